// Fused residual-add + RMSNorm for LibTorch. For every row of length H (the last dimension):
//
//     h    = input + residual                    residual_out, rounded to residual's dtype when stored
//     rstd = rsqrt(mean(h^2) + eps)              eps inside the root, divisor H
//     out  = h * rstd * (offset + weight)        one rounding, to input's dtype or out_dtype
//
// in fp32 arithmetic (fp64 for fp64 inputs). With dy = grad of out, dh = grad of residual_out, w = offset +
// weight and n = h * rstd, the gradients are
//
//     grad_input = grad_residual = dh + rstd * (dy * w - n * mean(dy * w * n))
//     grad_weight = sum over rows of dy * n
//
// weight is a vector of H elements of any floating dtype; without one, out = h * rstd whatever the offset.
// residual has input's dtype, or fp32 under a 16-bit input.
// casting_mode says where h and n are rounded on the way, so that the bits of a model's own norm can be met:
//
//     "fp32"   nowhere
//     "llama"  h and n to residual's dtype (Hugging Face Llama, Mistral, Qwen, ...)
//     "gemma"  h to residual's dtype (Hugging Face Gemma with offset 1; add followed by F.rms_norm with
//     offset 0)
//
// The backward is the formula above in every mode, on the stored h.
//
// Aliasing: results of the functional forms never alias an argument. add_rms_norm_ leaves out in input and h
// in residual, which must not share memory. In add_rms_norm_out each of out and residual_out may be exactly
// input, exactly residual, or memory that overlaps neither; they must not overlap each other. Both are for
// inference: they raise where a gradient would be lost.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace fused {

// Returns (out, residual_out). Differentiable.
std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& input, const at::Tensor& residual,
                                                const std::optional<at::Tensor>& weight = {},
                                                double eps = 1e-6, double offset = 0.0,
                                                std::string_view casting_mode = "fp32",
                                                std::optional<at::ScalarType> out_dtype = {});

// The vLLM/FlashInfer convention: input becomes out, residual becomes residual_out.
void add_rms_norm_(const at::Tensor& input, const at::Tensor& residual,
                   const std::optional<at::Tensor>& weight = {}, double eps = 1e-6, double offset = 0.0,
                   std::string_view casting_mode = "fp32");

// Writes the results where the caller wants them; out may have input's or residual's dtype.
void add_rms_norm_out(const at::Tensor& input, const at::Tensor& residual,
                      const std::optional<at::Tensor>& weight, double eps, double offset,
                      std::string_view casting_mode, const at::Tensor& out, const at::Tensor& residual_out);

// The same norm where there is no residual yet (h = input). Differentiable.
at::Tensor rms_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight = {}, double eps = 1e-6,
                    double offset = 0.0, std::string_view casting_mode = "fp32",
                    std::optional<at::ScalarType> out_dtype = {});

// What autograd calls. The forwards return rstd too: one fp32 (fp64 for fp64 inputs) a row, shaped
// input.shape[:-1].
std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm_forward(
    const at::Tensor& input, const at::Tensor& residual, const std::optional<at::Tensor>& weight, double eps,
    double offset, std::string_view casting_mode, std::optional<at::ScalarType> out_dtype);
std::tuple<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& input,
                                                    const std::optional<at::Tensor>& weight, double eps,
                                                    double offset, std::string_view casting_mode,
                                                    std::optional<at::ScalarType> out_dtype);

// Bits of output_mask: which gradients are computed; the others come back undefined.
constexpr int64_t kGradInput = 1;     // in input_dtype
constexpr int64_t kGradResidual = 2;  // the same numbers in residual_out's dtype, where that is another
constexpr int64_t kGradWeight = 4;    // in weight's dtype
std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm_backward(
    const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_residual_out,
    const at::Tensor& residual_out, const at::Tensor& rstd, const std::optional<at::Tensor>& weight,
    double eps, double offset, at::ScalarType input_dtype, int64_t output_mask);

}  // namespace fused
