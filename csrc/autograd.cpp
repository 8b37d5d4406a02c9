// Gradients: the autograd Function, the plain ATen formula for whatever is not a first derivative of plain
// tensors (functorch transforms, forward mode, second derivatives), and the refusals of the ops that write in
// place.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "host.h"

namespace fused {
namespace {

using at::Tensor;

// --- The formula -----------------------------------------------------------

Tensor formula_scale(const OptionalTensor& weight, double offset, at::ScalarType dtype) {
  return weight->to(dtype) + offset;
}

// (out, residual_out) of add_rms_norm, in ATen ops that every transform knows.
std::tuple<Tensor, Tensor> formula_forward(const ForwardCall& call, std::optional<at::ScalarType> out_dtype) {
  const auto out_type = check_out_dtype(call.op, out_dtype, call.input, call.stream());
  const auto dtype = accumulation_dtype(call.input.scalar_type());
  const auto residual_dtype = call.stream().scalar_type();
  Tensor h = call.input.to(dtype);
  if (call.residual) h = h + call.residual->to(dtype);
  Tensor residual_out = h.to(residual_dtype);
  if (call.mode.round_sum) h = residual_out.to(dtype);
  Tensor n = h * at::rsqrt(at::mean(h * h, -1, /*keepdim=*/true) + call.eps);
  if (call.mode.round_normalized) n = n.to(residual_dtype).to(dtype);
  if (call.weight) n = n * formula_scale(*call.weight, call.offset, dtype);
  return {n.to(out_type).contiguous(), residual_out.contiguous()};  // as the kernels' results are
}

// rstd is formed again from residual_out, so that its dependence on residual_out is differentiated too.
std::tuple<Tensor, Tensor, Tensor> formula_backward(const Tensor& grad_out,
                                                    const OptionalTensor& grad_residual_out,
                                                    const Tensor& residual_out, const OptionalTensor& weight,
                                                    double eps, double offset, at::ScalarType input_dtype,
                                                    int64_t output_mask) {
  const auto dtype = accumulation_dtype(residual_out.scalar_type());
  const Tensor h = residual_out.to(dtype), dy = grad_out.to(dtype);
  const Tensor rstd = at::rsqrt(at::mean(h * h, -1, /*keepdim=*/true) + eps);
  const Tensor n = h * rstd;
  Tensor grad_input, grad_residual, grad_weight;
  if (output_mask & (kGradInput | kGradResidual)) {
    const Tensor g = get(weight) ? dy * formula_scale(weight, offset, dtype) : dy;
    Tensor dx = rstd * (g - n * at::mean(g * n, -1, /*keepdim=*/true));
    if (get(grad_residual_out)) dx = dx + grad_residual_out->to(dtype);
    if (output_mask & kGradInput) grad_input = dx.to(input_dtype);
    if (output_mask & kGradResidual) grad_residual = dx.to(residual_out.scalar_type());
  }
  if (output_mask & kGradWeight) {
    const Tensor per_row = dy * n;
    const Tensor rows = per_row.dim() == 1 ? per_row.unsqueeze(0) : per_row.flatten(0, -2);
    grad_weight = rows.sum(0).to(weight->scalar_type());
  }
  return {std::move(grad_input), std::move(grad_residual), std::move(grad_weight)};
}

bool has_tangent(const Tensor* tensor) {
  return tensor && tensor->defined() && tensor->_fw_grad(0).defined();
}

// ATen/functorch/DynamicLayer.h cannot be included from an extension; its key tells the same.
bool in_functorch_transform() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

template <class... Tensors>
bool needs_formula(const Tensors*... tensors) {
  return in_functorch_transform() || (has_tangent(tensors) || ...);
}

template <class... Tensors>
bool needs_grad(const Tensors*... tensors) {
  return at::GradMode::is_enabled() && ((tensors && tensors->defined() && tensors->requires_grad()) || ...);
}

// --- The Function ----------------------------------------------------------

// add_rms_norm with a residual, rms_norm without. Returns (out, residual_out) or (out).
struct AddRMSNormFunction : torch::autograd::Function<AddRMSNormFunction> {
  static constexpr bool is_traceable = true;

  using AutogradContext = torch::autograd::AutogradContext;
  using variable_list = torch::autograd::variable_list;

  static variable_list forward(AutogradContext* ctx, const Tensor& input, const OptionalTensor& residual,
                               const OptionalTensor& weight, double eps, double offset,
                               std::string_view casting_mode, std::optional<at::ScalarType> out_dtype) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    Tensor out, residual_out, rstd;
    if (residual.has_value()) {
      std::tie(out, residual_out, rstd) =
          add_rms_norm_forward(input, *residual, weight, eps, offset, casting_mode, out_dtype);
    } else {
      std::tie(out, rstd) = rms_norm_forward(input, weight, eps, offset, casting_mode, out_dtype);
    }
    ctx->save_for_backward(
        {residual.has_value() ? residual_out : input, rstd, get(weight) ? *weight : Tensor()});
    ctx->set_materialize_grads(false);
    if (residual.has_value() && !input.requires_grad() && !residual->requires_grad()) {
      ctx->mark_non_differentiable({residual_out});  // it does not depend on the weight
    }
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["offset"] = offset;
    ctx->saved_data["input_dtype"] = static_cast<int64_t>(input.scalar_type());
    return residual.has_value() ? variable_list{out, residual_out} : variable_list{out};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    constexpr size_t kInput = 0, kResidual = 1, kWeight = 2, kArguments = 7;
    const bool has_residual = grads.size() > 1;
    const auto saved = ctx->get_saved_variables();
    const Tensor &residual_out = saved[0], &rstd = saved[1], &weight = saved[2];
    const Tensor& grad_out = grads[0];
    const Tensor grad_residual_out = has_residual ? grads[1] : Tensor();
    const auto input_dtype = static_cast<at::ScalarType>(ctx->saved_data["input_dtype"].toInt());
    // needs_input_grad counts the tensors that were given.
    const bool needs_input = ctx->needs_input_grad(kInput);
    const bool needs_residual = has_residual && ctx->needs_input_grad(kResidual);
    const bool needs_weight = weight.defined() && ctx->needs_input_grad(has_residual ? kWeight : kWeight - 1);

    variable_list results(kArguments);
    if (!grad_out.defined()) {  // only residual_out was used: the sum hands its gradient on
      if (needs_input && grad_residual_out.defined()) results[kInput] = grad_residual_out.to(input_dtype);
      if (needs_residual) results[kResidual] = grad_residual_out;
      return results;
    }

    // Equal dtypes: one tensor is both gradients, as in at::add.
    const bool same_dtype = input_dtype == residual_out.scalar_type();
    int64_t mask = 0;
    if (needs_input || (same_dtype && needs_residual)) mask |= kGradInput;
    if (!same_dtype && needs_residual) mask |= kGradResidual;
    if (needs_weight) mask |= kGradWeight;
    auto [grad_input, grad_residual, grad_weight] = add_rms_norm_backward(
        grad_out, grad_residual_out.defined() ? OptionalTensor(grad_residual_out) : std::nullopt,
        residual_out, rstd, weight.defined() ? OptionalTensor(weight) : std::nullopt,
        ctx->saved_data["eps"].toDouble(), ctx->saved_data["offset"].toDouble(), input_dtype, mask);
    if (needs_residual) results[kResidual] = same_dtype ? grad_input : grad_residual;
    if (needs_input) results[kInput] = grad_input;
    if (needs_weight) results[kWeight] = grad_weight;
    return results;
  }
};

// --- Autograd kernels ------------------------------------------------------

std::tuple<Tensor, Tensor> add_rms_norm_autograd(const Tensor& input, const Tensor& residual,
                                                 const OptionalTensor& weight, double eps, double offset,
                                                 std::string_view casting_mode,
                                                 std::optional<at::ScalarType> out_dtype) {
  if (needs_formula(&input, &residual, get(weight))) {
    return formula_forward({"add_rms_norm", input, &residual, weight, eps, offset, casting_mode}, out_dtype);
  }
  if (needs_grad(&input, &residual, get(weight))) {
    auto results = AddRMSNormFunction::apply(input, OptionalTensor(residual), weight, eps, offset,
                                             casting_mode, out_dtype);
    return {std::move(results[0]), std::move(results[1])};
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return add_rms_norm(input, residual, weight, eps, offset, casting_mode, out_dtype);
}

Tensor rms_norm_autograd(const Tensor& input, const OptionalTensor& weight, double eps, double offset,
                         std::string_view casting_mode, std::optional<at::ScalarType> out_dtype) {
  if (needs_formula(&input, get(weight))) {
    return std::get<0>(
        formula_forward({"rms_norm", input, nullptr, weight, eps, offset, casting_mode}, out_dtype));
  }
  if (needs_grad(&input, get(weight))) {
    return AddRMSNormFunction::apply(input, OptionalTensor(), weight, eps, offset, casting_mode,
                                     out_dtype)[0];
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return rms_norm(input, weight, eps, offset, casting_mode, out_dtype);
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_backward_autograd(
    const Tensor& grad_out, const OptionalTensor& grad_residual_out, const Tensor& residual_out,
    const Tensor& rstd, const OptionalTensor& weight, double eps, double offset, at::ScalarType input_dtype,
    int64_t output_mask) {
  const Tensor *dh = get(grad_residual_out), *w = get(weight);
  if (needs_formula(&grad_out, dh, &residual_out, w) || needs_grad(&grad_out, dh, &residual_out, w)) {
    check_backward(grad_out, dh, residual_out, rstd, w, eps, offset, input_dtype, output_mask);
    return formula_backward(grad_out, grad_residual_out, residual_out, weight, eps, offset, input_dtype,
                            output_mask);
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return add_rms_norm_backward(grad_out, grad_residual_out, residual_out, rstd, weight, eps, offset,
                               input_dtype, output_mask);
}

template <class... Tensors>
void check_no_grad(const char* op, const Tensors*... tensors) {
  TORCH_CHECK(!needs_grad(tensors...) && !(has_tangent(tensors) || ...), op,
              ": expected tensors that need no gradient (it overwrites its arguments and is for inference), "
              "got one that "
              "requires grad or carries a tangent; call add_rms_norm, or run under torch.no_grad()");
}

void add_rms_norm_inplace_autograd(const Tensor& input, const Tensor& residual, const OptionalTensor& weight,
                                   double eps, double offset, std::string_view casting_mode) {
  check_no_grad("add_rms_norm_", &input, &residual, get(weight));
  at::AutoDispatchBelowAutograd below_autograd;
  add_rms_norm_(input, residual, weight, eps, offset, casting_mode);
}

void add_rms_norm_out_autograd(const Tensor& input, const Tensor& residual, const OptionalTensor& weight,
                               double eps, double offset, std::string_view casting_mode, const Tensor& out,
                               const Tensor& residual_out) {
  check_no_grad("add_rms_norm_out", &input, &residual, get(weight), &out, &residual_out);
  at::AutoDispatchBelowAutograd below_autograd;
  add_rms_norm_out(input, residual, weight, eps, offset, casting_mode, out, residual_out);
}

// The stock fallback does not bump the versions of an op that returns nothing.
void bump_versions(const Tensor& a, const Tensor& b) {
  for (const Tensor* tensor : {&a, &b}) {
    if (!tensor->is_inference()) tensor->unsafeGetTensorImpl()->bump_version();
  }
}

void add_rms_norm_inplace_bump(const Tensor& input, const Tensor& residual, const OptionalTensor& weight,
                               double eps, double offset, std::string_view casting_mode) {
  {
    at::AutoDispatchBelowADInplaceOrView below;
    add_rms_norm_(input, residual, weight, eps, offset, casting_mode);
  }
  bump_versions(input, residual);
}

void add_rms_norm_out_bump(const Tensor& input, const Tensor& residual, const OptionalTensor& weight,
                           double eps, double offset, std::string_view casting_mode, const Tensor& out,
                           const Tensor& residual_out) {
  {
    at::AutoDispatchBelowADInplaceOrView below;
    add_rms_norm_out(input, residual, weight, eps, offset, casting_mode, out, residual_out);
  }
  bump_versions(out, residual_out);
}

TORCH_LIBRARY_IMPL(fused, Autograd, m) {
  m.impl("add_rms_norm", add_rms_norm_autograd);
  m.impl("rms_norm", rms_norm_autograd);
  m.impl("add_rms_norm_backward", add_rms_norm_backward_autograd);
  m.impl("add_rms_norm_", add_rms_norm_inplace_autograd);
  m.impl("add_rms_norm_out", add_rms_norm_out_autograd);
  m.impl("add_rms_norm_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("rms_norm_forward", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(fused, ADInplaceOrView, m) {
  m.impl("add_rms_norm_", add_rms_norm_inplace_bump);
  m.impl("add_rms_norm_out", add_rms_norm_out_bump);
}

}  // namespace
}  // namespace fused
