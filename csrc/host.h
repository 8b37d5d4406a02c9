// The host side of every op, the same on all devices: check, allocate, describe the tensors as rows, hand
// over to the backend's kernels. A backend gives two functions,
//
//     static void forward(const ForwardParams&, const at::Tensor& input);
//     static void backward(const BackwardParams&, const at::Tensor& residual_out);
//
// whose tensor argument names the device and the allocator; or it sets kTracing and computes nothing.
#pragma once

#include <ATen/Functions.h>
#include <torch/library.h>

#include "add_rms_norm.h"
#include "checks.h"
#include "rows.h"

namespace fused {

using OptionalTensor = std::optional<at::Tensor>;

inline const at::Tensor* get(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined() ? &*tensor : nullptr;
}

inline DType kernel_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return DType::kHalf;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat;
    default:
      return DType::kDouble;
  }
}

inline at::Tensor empty_like_rows(const at::Tensor& tensor, at::ScalarType dtype) {
  return at::empty_symint(tensor.sym_sizes(), tensor.options().dtype(dtype));
}

inline at::Tensor empty_rstd(const at::Tensor& input) {
  return at::empty_symint(input.sym_sizes().slice(0, input.dim() - 1),
                          input.options().dtype(accumulation_dtype(input.scalar_type())));
}

// The weight as kernels read it: dense, in input's dtype or in the one computed in. One of another dtype, or
// strided, is copied.
inline at::Tensor dense_weight(const at::Tensor* weight, at::ScalarType input_dtype) {
  if (weight == nullptr) return {};
  const auto compute_dtype = accumulation_dtype(input_dtype);
  const auto dtype = weight->scalar_type() == input_dtype ? input_dtype : compute_dtype;
  return weight->to(dtype).contiguous();
}

inline Weight kernel_weight(const at::Tensor& weight) {
  return weight.defined() ? Weight{weight.data_ptr(), kernel_dtype(weight.scalar_type())} : Weight{};
}

// The arguments common to the forward ops, checked. residual is null in rms_norm.
struct ForwardCall {
  ForwardCall(const char* op, const at::Tensor& input, const at::Tensor* residual,
              const OptionalTensor& weight, double eps, double offset, std::string_view casting_mode)
      : op(op), input(input), residual(residual), weight(get(weight)), eps(eps), offset(offset) {
    check_input(op, input);
    if (residual) check_residual(op, *residual, input);
    if (this->weight) check_weight(op, *this->weight, input);
    check_scalars(op, eps, offset);
    mode = check_casting_mode(op, casting_mode);
  }

  const at::Tensor& stream() const { return residual ? *residual : input; }

  const char* op;
  const at::Tensor& input;
  const at::Tensor* residual;
  const at::Tensor* weight;
  double eps, offset;
  CastingMode mode;
};

using ForwardLayout = RowLayout<4>;  // of input, residual, out, residual_out

template <class Backend>
void launch_forward(const ForwardCall& call, const ForwardLayout& layout, const at::Tensor& out, void* rstd) {
  const at::Tensor weight = dense_weight(call.weight, call.input.scalar_type());
  ForwardParams params;
  params.shape = layout.shape;
  params.input = layout.tensors[0];
  params.residual = layout.tensors[1];
  params.out = layout.tensors[2];
  params.residual_out = layout.tensors[3];
  params.rstd = rstd;
  params.weight = kernel_weight(weight);
  params.input_dtype = kernel_dtype(call.input.scalar_type());
  params.residual_dtype = kernel_dtype(call.stream().scalar_type());
  params.out_dtype = kernel_dtype(out.scalar_type());
  params.eps = call.eps;
  params.offset = call.offset;
  params.round_sum = call.mode.round_sum;
  params.round_normalized = call.mode.round_normalized;
  Backend::forward(params, call.input);
}

struct ForwardResults {
  at::Tensor out, residual_out, rstd;
};

// Fresh contiguous results; residual_out only where there is a residual.
template <class Backend>
ForwardResults forward(const ForwardCall& call, std::optional<at::ScalarType> out_dtype, bool with_rstd) {
  const at::ScalarType dtype = check_out_dtype(call.op, out_dtype, call.input, call.stream());
  ForwardResults results;
  results.out = empty_like_rows(call.input, dtype);
  if (call.residual) results.residual_out = empty_like_rows(call.input, call.residual->scalar_type());
  if (with_rstd) results.rstd = empty_rstd(call.input);

  if constexpr (!Backend::kTracing) {
    if (call.input.numel() == 0) return results;
    const at::Tensor* residual_out = call.residual ? &results.residual_out : nullptr;
    void* rstd = with_rstd ? results.rstd.data_ptr() : nullptr;
    if (auto layout = row_layout<4>({&call.input, call.residual, &results.out, residual_out})) {
      launch_forward<Backend>(call, *layout, results.out, rstd);
    } else {
      const at::Tensor input = call.input.contiguous();
      const at::Tensor residual = call.residual ? call.residual->contiguous() : at::Tensor();
      layout = row_layout<4>({&input, call.residual ? &residual : nullptr, &results.out, residual_out});
      launch_forward<Backend>(call, *layout, results.out, rstd);
    }
  }
  return results;
}

// Results in the caller's memory: followed through its strides or refused, never written to a temporary.
template <class Backend>
void forward_into(const ForwardCall& call, const at::Tensor& out, const at::Tensor& residual_out) {
  if constexpr (!Backend::kTracing) {
    if (call.input.numel() == 0) return;
    const auto layout = row_layout<4>({&call.input, call.residual, &out, &residual_out});
    TORCH_CHECK(
        layout, call.op,
        ": expected tensors with a dense last dimension and leading dimensions that fold into at most "
        "two strides, got strides ",
        call.input.strides(), " (input), ", call.residual->strides(), " (residual), ", out.strides(),
        " (out), ", residual_out.strides(), " (residual_out)");
    const auto& [x, r, y, h] = layout->tensors;
    const auto itemsize = [](const at::Tensor& tensor) { return static_cast<int64_t>(tensor.itemsize()); };
    const auto check_apart = [&](bool apart, const char* a, const char* b) {
      TORCH_CHECK(apart, call.op, ": expected ", a, " and ", b,
                  " not to overlap, got tensors that share memory");
    };
    TORCH_CHECK(!overlaps_itself(y, layout->shape), call.op,
                ": expected rows that do not share memory, got strides ", out.strides(), " (out)");
    TORCH_CHECK(!overlaps_itself(h, layout->shape), call.op,
                ": expected rows that do not share memory, got strides ", residual_out.strides(),
                " (residual_out)");
    const bool in_place = out.is_same(call.input) && residual_out.is_same(*call.residual);
    check_apart(overlap(y, itemsize(out), h, itemsize(residual_out), layout->shape) == Overlap::kNone,
                in_place ? "input" : "out", in_place ? "residual" : "residual_out");
    for (const auto& [result, result_itemsize, name] :
         {std::tuple(y, itemsize(out), "out"), std::tuple(h, itemsize(residual_out), "residual_out")}) {
      check_apart(
          overlap(result, result_itemsize, x, itemsize(call.input), layout->shape) != Overlap::kPartial, name,
          "input");
      check_apart(
          overlap(result, result_itemsize, r, itemsize(*call.residual), layout->shape) != Overlap::kPartial,
          name, "residual");
      if (call.weight) {
        const auto distance =
            static_cast<const char*>(call.weight->data_ptr()) - static_cast<const char*>(result.data);
        const int64_t weight_bytes =
            ((call.weight->numel() - 1) * call.weight->stride(0) + 1) * itemsize(*call.weight);
        check_apart(
            distance >= span_bytes(result, layout->shape, result_itemsize) || -distance >= weight_bytes, name,
            "weight");
      }
    }
    launch_forward<Backend>(call, *layout, out, nullptr);
  }
}

template <class Backend>
struct Ops {
  static std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& input, const at::Tensor& residual,
                                                         const OptionalTensor& weight, double eps,
                                                         double offset, std::string_view casting_mode,
                                                         std::optional<at::ScalarType> out_dtype) {
    const ForwardCall call("add_rms_norm", input, &residual, weight, eps, offset, casting_mode);
    auto results = forward<Backend>(call, out_dtype, /*with_rstd=*/false);
    return {std::move(results.out), std::move(results.residual_out)};
  }

  static std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm_forward(
      const at::Tensor& input, const at::Tensor& residual, const OptionalTensor& weight, double eps,
      double offset, std::string_view casting_mode, std::optional<at::ScalarType> out_dtype) {
    const ForwardCall call("add_rms_norm", input, &residual, weight, eps, offset, casting_mode);
    auto results = forward<Backend>(call, out_dtype, /*with_rstd=*/true);
    return {std::move(results.out), std::move(results.residual_out), std::move(results.rstd)};
  }

  static at::Tensor rms_norm(const at::Tensor& input, const OptionalTensor& weight, double eps, double offset,
                             std::string_view casting_mode, std::optional<at::ScalarType> out_dtype) {
    const ForwardCall call("rms_norm", input, nullptr, weight, eps, offset, casting_mode);
    return forward<Backend>(call, out_dtype, /*with_rstd=*/false).out;
  }

  static std::tuple<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& input,
                                                             const OptionalTensor& weight, double eps,
                                                             double offset, std::string_view casting_mode,
                                                             std::optional<at::ScalarType> out_dtype) {
    const ForwardCall call("rms_norm", input, nullptr, weight, eps, offset, casting_mode);
    auto results = forward<Backend>(call, out_dtype, /*with_rstd=*/true);
    return {std::move(results.out), std::move(results.rstd)};
  }

  static void add_rms_norm_(const at::Tensor& input, const at::Tensor& residual, const OptionalTensor& weight,
                            double eps, double offset, std::string_view casting_mode) {
    const ForwardCall call("add_rms_norm_", input, &residual, weight, eps, offset, casting_mode);
    forward_into<Backend>(call, input, residual);
  }

  static void add_rms_norm_out(const at::Tensor& input, const at::Tensor& residual,
                               const OptionalTensor& weight, double eps, double offset,
                               std::string_view casting_mode, const at::Tensor& out,
                               const at::Tensor& residual_out) {
    const ForwardCall call("add_rms_norm_out", input, &residual, weight, eps, offset, casting_mode);
    check_like_input(call.op, "out", out, input);
    check_like_input(call.op, "residual_out", residual_out, input);
    check_out_dtype(call.op, out.scalar_type(), input, residual);
    check_dtype(call.op, "residual_out", residual_out, "residual's", residual.scalar_type());
    forward_into<Backend>(call, out, residual_out);
  }

  static std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm_backward(
      const at::Tensor& grad_out, const OptionalTensor& grad_residual_out, const at::Tensor& residual_out,
      const at::Tensor& rstd, const OptionalTensor& weight, double eps, double offset,
      at::ScalarType input_dtype, int64_t output_mask) {
    const at::Tensor* dh = get(grad_residual_out);
    check_backward(grad_out, dh, residual_out, rstd, get(weight), eps, offset, input_dtype, output_mask);

    at::Tensor grad_input, grad_residual, grad_weight;
    if (output_mask & kGradInput) grad_input = empty_like_rows(residual_out, input_dtype);
    if (output_mask & kGradResidual)
      grad_residual = empty_like_rows(residual_out, residual_out.scalar_type());
    if (output_mask & kGradWeight) grad_weight = at::empty_symint(weight->sym_sizes(), weight->options());

    if constexpr (!Backend::kTracing) {
      if (residual_out.numel() == 0) {
        if (grad_weight.defined()) grad_weight.zero_();
      } else if (output_mask != 0) {
        const auto launch = [&](const RowLayout<5>& layout) {
          const at::Tensor scale = dense_weight(get(weight), input_dtype);
          BackwardParams params;
          params.shape = layout.shape;
          params.grad_out = layout.tensors[0];
          params.grad_residual_out = layout.tensors[1];
          params.residual_out = layout.tensors[2];
          params.grad_input = layout.tensors[3];
          params.grad_residual = layout.tensors[4];
          params.rstd = rstd.data_ptr();
          params.weight = kernel_weight(scale);
          if (grad_weight.defined()) {
            params.grad_weight = grad_weight.data_ptr();
            params.grad_weight_dtype = kernel_dtype(grad_weight.scalar_type());
          }
          params.input_dtype = kernel_dtype(input_dtype);
          params.residual_dtype = kernel_dtype(residual_out.scalar_type());
          params.out_dtype = kernel_dtype(grad_out.scalar_type());
          params.offset = offset;
          Backend::backward(params, residual_out);
        };
        const auto defined = [](const at::Tensor& tensor) { return tensor.defined() ? &tensor : nullptr; };
        if (auto layout =
                row_layout<5>({&grad_out, dh, &residual_out, defined(grad_input), defined(grad_residual)})) {
          launch(*layout);
        } else {
          const at::Tensor dy = grad_out.contiguous(), h = residual_out.contiguous();
          const at::Tensor dense_dh = dh ? dh->contiguous() : at::Tensor();
          launch(*row_layout<5>({&dy, defined(dense_dh), &h, defined(grad_input), defined(grad_residual)}));
        }
      }
    }
    return {std::move(grad_input), std::move(grad_residual), std::move(grad_weight)};
  }

  static void register_in(torch::Library& library) {
    library.impl("add_rms_norm", add_rms_norm);
    library.impl("add_rms_norm_", add_rms_norm_);
    library.impl("add_rms_norm_out", add_rms_norm_out);
    library.impl("rms_norm", rms_norm);
    library.impl("add_rms_norm_forward", add_rms_norm_forward);
    library.impl("rms_norm_forward", rms_norm_forward);
    library.impl("add_rms_norm_backward", add_rms_norm_backward);
  }
};

}  // namespace fused
