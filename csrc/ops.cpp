// torch.ops.fused: the schemas, and the public C++ functions that call them through the dispatcher.
#include <ATen/core/dispatch/Dispatcher.h>

#include "host.h"

TORCH_LIBRARY(fused, m) {
  m.set_python_module("fused_add_rms_norm");
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  // Takes any strides, without a difference to its results: torch.compile leaves the arguments as they are.
  const std::vector<at::Tag> tags_of_forward = {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
  m.def(
      "add_rms_norm(Tensor input, Tensor residual, Tensor? weight=None, float eps=1e-6, *, float offset=0.0, "
      "str casting_mode=\"fp32\", ScalarType? out_dtype=None) -> (Tensor out, Tensor residual_out)",
      tags_of_forward);
  m.def(
      "add_rms_norm_(Tensor(a!) input, Tensor(b!) residual, Tensor? weight=None, float eps=1e-6, *, float "
      "offset=0.0, "
      "str casting_mode=\"fp32\") -> ()",
      tags);
  m.def(
      "add_rms_norm_out(Tensor input, Tensor residual, Tensor? weight=None, float eps=1e-6, *, float "
      "offset=0.0, "
      "str casting_mode=\"fp32\", Tensor(a!) out, Tensor(b!) residual_out) -> ()",
      tags);
  m.def(
      "rms_norm(Tensor input, Tensor? weight=None, float eps=1e-6, *, float offset=0.0, str "
      "casting_mode=\"fp32\", "
      "ScalarType? out_dtype=None) -> Tensor",
      tags_of_forward);
  m.def(
      "add_rms_norm_forward(Tensor input, Tensor residual, Tensor? weight, float eps, float offset, str "
      "casting_mode, "
      "ScalarType? out_dtype) -> (Tensor out, Tensor residual_out, Tensor rstd)",
      tags_of_forward);
  m.def(
      "rms_norm_forward(Tensor input, Tensor? weight, float eps, float offset, str casting_mode, ScalarType? "
      "out_dtype) "
      "-> (Tensor out, Tensor rstd)",
      tags_of_forward);
  // output_mask is an int: DTensor's sharding cache ignores booleans and would mix up frozen and trainable
  // weights.
  m.def(
      "add_rms_norm_backward(Tensor grad_out, Tensor? grad_residual_out, Tensor residual_out, Tensor rstd, "
      "Tensor? weight, "
      "float eps, float offset, ScalarType input_dtype, int output_mask) "
      "-> (Tensor grad_input, Tensor grad_residual, Tensor grad_weight)",
      tags);
}

namespace fused {
namespace {

// Shapes, dtypes and errors without a device: fake tensors, torch.compile and torch.export.
struct Tracing {
  static constexpr bool kTracing = true;
};
TORCH_LIBRARY_IMPL(fused, Meta, m) { Ops<Tracing>::register_in(m); }

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& input, const at::Tensor& residual,
                                                const OptionalTensor& weight, double eps, double offset,
                                                std::string_view casting_mode,
                                                std::optional<at::ScalarType> out_dtype) {
  static const auto op = find<decltype(add_rms_norm)>("fused::add_rms_norm");
  return op.call(input, residual, weight, eps, offset, casting_mode, out_dtype);
}

void add_rms_norm_(const at::Tensor& input, const at::Tensor& residual, const OptionalTensor& weight,
                   double eps, double offset, std::string_view casting_mode) {
  static const auto op = find<decltype(add_rms_norm_)>("fused::add_rms_norm_");
  op.call(input, residual, weight, eps, offset, casting_mode);
}

void add_rms_norm_out(const at::Tensor& input, const at::Tensor& residual, const OptionalTensor& weight,
                      double eps, double offset, std::string_view casting_mode, const at::Tensor& out,
                      const at::Tensor& residual_out) {
  static const auto op = find<decltype(add_rms_norm_out)>("fused::add_rms_norm_out");
  op.call(input, residual, weight, eps, offset, casting_mode, out, residual_out);
}

at::Tensor rms_norm(const at::Tensor& input, const OptionalTensor& weight, double eps, double offset,
                    std::string_view casting_mode, std::optional<at::ScalarType> out_dtype) {
  static const auto op = find<decltype(rms_norm)>("fused::rms_norm");
  return op.call(input, weight, eps, offset, casting_mode, out_dtype);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm_forward(
    const at::Tensor& input, const at::Tensor& residual, const OptionalTensor& weight, double eps,
    double offset, std::string_view casting_mode, std::optional<at::ScalarType> out_dtype) {
  static const auto op = find<decltype(add_rms_norm_forward)>("fused::add_rms_norm_forward");
  return op.call(input, residual, weight, eps, offset, casting_mode, out_dtype);
}

std::tuple<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& input, const OptionalTensor& weight,
                                                    double eps, double offset, std::string_view casting_mode,
                                                    std::optional<at::ScalarType> out_dtype) {
  static const auto op = find<decltype(rms_norm_forward)>("fused::rms_norm_forward");
  return op.call(input, weight, eps, offset, casting_mode, out_dtype);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm_backward(
    const at::Tensor& grad_out, const OptionalTensor& grad_residual_out, const at::Tensor& residual_out,
    const at::Tensor& rstd, const OptionalTensor& weight, double eps, double offset,
    at::ScalarType input_dtype, int64_t output_mask) {
  static const auto op = find<decltype(add_rms_norm_backward)>("fused::add_rms_norm_backward");
  return op.call(grad_out, grad_residual_out, residual_out, rstd, weight, eps, offset, input_dtype,
                 output_mask);
}

}  // namespace fused
