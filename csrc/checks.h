// Every message a wrong argument gets. All read "<op>: expected <what>, got <what came>", and are raised
// before anything is launched or overwritten. Sizes are symbolic, so that tracing with unknown sizes meets
// the same checks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <optional>
#include <string_view>

#include "add_rms_norm.h"

namespace fused {

struct CastingMode {
  bool round_sum, round_normalized;
};

inline const char* dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    default:
      return c10::toString(dtype);
  }
}

inline bool is_16_bit(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

inline bool is_supported(at::ScalarType dtype) {
  return is_16_bit(dtype) || dtype == at::kFloat || dtype == at::kDouble;
}

// Statistics and arithmetic: fp32, or fp64 for fp64 inputs.
inline at::ScalarType accumulation_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? dtype : at::kFloat;
}

inline CastingMode check_casting_mode(const char* op, std::string_view name) {
  if (name == "fp32") return {false, false};
  if (name == "llama") return {true, true};
  if (name == "gemma") return {true, false};
  TORCH_CHECK(false, op, ": expected casting_mode 'fp32', 'llama' or 'gemma', got '", name, "'");
}

inline void check_like_input(const char* op, const char* name, const at::Tensor& tensor,
                             const at::Tensor& input) {
  TORCH_CHECK(tensor.sym_sizes().equals(input.sym_sizes()), op, ": expected ", name, " of input's shape ",
              input.sym_sizes(), ", got ", tensor.sym_sizes());
  TORCH_CHECK(tensor.device() == input.device(), op, ": expected ", name, " on input's device ",
              input.device(), ", got ", tensor.device());
}

inline void check_input(const char* op, const at::Tensor& input) {
  TORCH_CHECK(input.dim() >= 1 && input.sym_size(-1) >= 1, op,
              ": expected input with at least one dimension and a last dimension of at least 1, got shape ",
              input.sym_sizes());
  TORCH_CHECK(is_supported(input.scalar_type()), op,
              ": expected input of dtype float16, bfloat16, float32 or float64, got ",
              dtype_name(input.scalar_type()));
}

inline void check_residual(const char* op, const at::Tensor& residual, const at::Tensor& input) {
  check_like_input(op, "residual", residual, input);
  const auto dtype = input.scalar_type();
  TORCH_CHECK(residual.scalar_type() == dtype || (is_16_bit(dtype) && residual.scalar_type() == at::kFloat),
              op, ": expected residual of input's dtype ", dtype_name(dtype),
              is_16_bit(dtype) ? " or float32" : "", ", got ", dtype_name(residual.scalar_type()));
}

inline void check_weight(const char* op, const at::Tensor& weight, const at::Tensor& input) {
  TORCH_CHECK(weight.dim() == 1 && weight.sym_size(0) == input.sym_size(-1), op,
              ": expected weight of shape [", input.sym_size(-1), "] (input's last dimension), got ",
              weight.sym_sizes());
  TORCH_CHECK(is_supported(weight.scalar_type()), op,
              ": expected weight of dtype float16, bfloat16, float32 or float64, got ",
              dtype_name(weight.scalar_type()));
  TORCH_CHECK(weight.device() == input.device(), op, ": expected weight on input's device ", input.device(),
              ", got ", weight.device());
}

inline void check_scalars(const char* op, double eps, double offset) {
  TORCH_CHECK(std::isfinite(eps) && eps > 0, op, ": expected a finite eps > 0, got ", eps);
  TORCH_CHECK(std::isfinite(offset), op, ": expected a finite offset, got ", offset);
}

inline void check_dtype(const char* op, const char* name, const at::Tensor& tensor, const char* whose,
                        at::ScalarType dtype) {
  TORCH_CHECK(tensor.scalar_type() == dtype, op, ": expected ", name, " of ", whose, " dtype ",
              dtype_name(dtype), ", got ", dtype_name(tensor.scalar_type()));
}

// The dtype of out: out_dtype where given, which must be input's or residual's.
inline at::ScalarType check_out_dtype(const char* op, std::optional<at::ScalarType> out_dtype,
                                      const at::Tensor& input, const at::Tensor& residual) {
  const auto dtype = out_dtype.value_or(input.scalar_type());
  TORCH_CHECK(dtype == input.scalar_type() || dtype == residual.scalar_type(), op,
              ": expected out dtype of input ", dtype_name(input.scalar_type()), " or of residual ",
              dtype_name(residual.scalar_type()), ", got ", dtype_name(dtype));
  return dtype;
}

// residual_out takes input's place here: it has its shape and its device.
inline void check_backward(const at::Tensor& grad_out, const at::Tensor* grad_residual_out,
                           const at::Tensor& residual_out, const at::Tensor& rstd, const at::Tensor* weight,
                           double eps, double offset, at::ScalarType input_dtype, int64_t output_mask) {
  const char* op = "add_rms_norm_backward";
  check_input(op, residual_out);
  const auto residual_dtype = residual_out.scalar_type();
  TORCH_CHECK(input_dtype == residual_dtype || (is_16_bit(input_dtype) && residual_dtype == at::kFloat), op,
              ": expected input_dtype of residual_out's dtype ", dtype_name(residual_dtype),
              residual_dtype == at::kFloat ? " or a 16-bit one" : "", ", got ", dtype_name(input_dtype));
  check_like_input(op, "grad_out", grad_out, residual_out);
  TORCH_CHECK(grad_out.scalar_type() == input_dtype || grad_out.scalar_type() == residual_dtype, op,
              ": expected grad_out of dtype ", dtype_name(input_dtype), " or ", dtype_name(residual_dtype),
              ", got ", dtype_name(grad_out.scalar_type()));
  if (grad_residual_out) {
    check_like_input(op, "grad_residual_out", *grad_residual_out, residual_out);
    check_dtype(op, "grad_residual_out", *grad_residual_out, "residual_out's", residual_dtype);
  }
  check_dtype(op, "rstd", rstd, "the accumulation", accumulation_dtype(residual_dtype));
  TORCH_CHECK(rstd.sym_sizes().equals(residual_out.sym_sizes().slice(0, residual_out.dim() - 1)) &&
                  rstd.is_contiguous(),
              op, ": expected a contiguous rstd of shape ",
              residual_out.sym_sizes().slice(0, residual_out.dim() - 1), ", got ", rstd.sym_sizes());
  TORCH_CHECK(rstd.device() == residual_out.device(), op, ": expected rstd on residual_out's device ",
              residual_out.device(), ", got ", rstd.device());
  if (weight) check_weight(op, *weight, residual_out);
  check_scalars(op, eps, offset);
  TORCH_CHECK(output_mask >= 0 && output_mask <= (kGradInput | kGradResidual | kGradWeight), op,
              ": expected output_mask of bits 1, 2 and 4, got ", output_mask);
  TORCH_CHECK(
      !(output_mask & kGradResidual) || input_dtype != residual_dtype, op,
      ": expected output_mask without bit 2 where input and residual have one dtype and gradient, got ",
      output_mask);
  TORCH_CHECK(weight || !(output_mask & kGradWeight), op,
              ": expected a weight where its gradient is asked for, got none");
}

}  // namespace fused
