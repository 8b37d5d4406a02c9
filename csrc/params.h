// What a kernel is told: raw pointers and strides, no torch type, so that CUDA sources compile without
// torch's headers.
#pragma once

#include <cstdint>

namespace fused {

enum class DType : int8_t { kHalf, kBFloat16, kFloat, kDouble };

// One tensor seen as rows of cols dense elements. Row r stands at
// data + (r / inner_rows) * outer_stride + (r % inner_rows) * inner_stride; strides in elements, 64-bit
// everywhere.
struct Rows {
  void* data = nullptr;  // null: the tensor is absent
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;
};

// rows, inner_rows and cols are shared by all tensors of a call; rows and cols are at least 1.
struct Shape {
  int64_t rows = 0;
  int64_t inner_rows = 0;
  int64_t cols = 0;
};

// cols dense elements of input's dtype or of the one computed in (fp32; fp64 for fp64 inputs).
struct Weight {
  const void* data = nullptr;  // null: absent
  DType dtype = DType::kFloat;
};

struct ForwardParams {
  Shape shape;
  Rows input, residual, out, residual_out;  // residual and residual_out absent: h = input
  void* rstd = nullptr;                     // rows elements of the accumulation type, or null
  Weight weight;
  DType input_dtype, residual_dtype, out_dtype;
  double eps, offset;
  bool round_sum, round_normalized;  // to residual_dtype, before the statistics and before the weight
};

struct BackwardParams {
  Shape shape;
  Rows grad_out, grad_residual_out, residual_out;  // grad_residual_out may be absent
  Rows grad_input, grad_residual;                  // either may be absent
  const void* rstd = nullptr;
  Weight weight;
  void* grad_weight = nullptr;  // cols elements of grad_weight_dtype, or null
  DType input_dtype, residual_dtype, out_dtype, grad_weight_dtype;
  double offset;
};

}  // namespace fused
