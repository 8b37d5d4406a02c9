// Tensors as rows: which strides a kernel follows without a copy, and which rows share memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdlib>
#include <optional>

#include "params.h"

namespace fused {

template <size_t N>
struct RowLayout {
  Shape shape;
  std::array<Rows, N> tensors;
};

// Folds the leading dimensions of all tensors (equal sizes; null = absent) together into at most two levels.
// Nothing where they need more, or where a last dimension is not dense.
template <size_t N>
std::optional<RowLayout<N>> row_layout(const std::array<const at::Tensor*, N>& tensors) {
  const at::IntArrayRef sizes = tensors[0]->sizes();
  const int64_t cols = sizes.back();
  RowLayout<N> layout{{tensors[0]->numel() / cols, 1, cols}, {}};

  bool contiguous = true;
  for (size_t i = 0; i < N; ++i) {
    if (tensors[i] == nullptr) continue;
    layout.tensors[i].data = tensors[i]->data_ptr();
    contiguous = contiguous && tensors[i]->is_contiguous();
    if (cols > 1 && tensors[i]->strides().back() != 1) return std::nullopt;
  }
  if (contiguous) {
    layout.shape.inner_rows = layout.shape.rows;
    for (Rows& rows : layout.tensors) rows.inner_stride = cols;
    return layout;
  }

  int64_t Rows::*stride = &Rows::inner_stride;  // of the level being filled, innermost first
  int64_t level_size = 0;
  for (auto dim = static_cast<int64_t>(sizes.size()) - 2; dim >= 0; --dim) {
    if (sizes[dim] == 1) continue;
    bool folds = level_size > 0;
    for (size_t i = 0; i < N && folds; ++i) {
      folds = tensors[i] == nullptr || tensors[i]->stride(dim) == layout.tensors[i].*stride * level_size;
    }
    if (folds) {
      level_size *= sizes[dim];
    } else {
      if (stride == &Rows::outer_stride) return std::nullopt;
      if (level_size > 0) {
        layout.shape.inner_rows = level_size;
        stride = &Rows::outer_stride;
      }
      level_size = sizes[dim];
      for (size_t i = 0; i < N; ++i) {
        if (tensors[i] != nullptr) layout.tensors[i].*stride = tensors[i]->stride(dim);
      }
    }
    if (stride == &Rows::inner_stride) layout.shape.inner_rows = level_size;
  }
  return layout;
}

// Whether two periodic sets of intervals meet: [0, a_length) and [distance, distance + b_length), each
// repeated every `period`.
inline bool intervals_meet(int64_t distance, int64_t a_length, int64_t b_length, int64_t period) {
  if (period < a_length || period < b_length) return true;
  const int64_t shift = ((distance % period) + period) % period;
  return shift < a_length || shift + b_length > period;
}

// The span in bytes from a tensor's first element to one past its last.
inline int64_t span_bytes(const Rows& rows, const Shape& shape, int64_t itemsize) {
  return ((shape.rows / shape.inner_rows - 1) * rows.outer_stride +
          (shape.inner_rows - 1) * rows.inner_stride + shape.cols) *
         itemsize;
}

// Two rows of one tensor share memory: a result written there would depend on the order of rows.
inline bool overlaps_itself(const Rows& rows, const Shape& shape) {
  const int64_t outer_rows = shape.rows / shape.inner_rows;
  const auto nested = [&](int64_t small_rows, int64_t small, int64_t large_rows, int64_t large) {
    return (small_rows == 1 || small >= shape.cols) &&
           (large_rows == 1 || large >= (small_rows - 1) * small + shape.cols);
  };
  return !nested(shape.inner_rows, rows.inner_stride, outer_rows, rows.outer_stride) &&
         !nested(outer_rows, rows.outer_stride, shape.inner_rows, rows.inner_stride);
}

enum class Overlap { kNone, kSame, kPartial };

// Exact for tensors with equal strides in bytes (views side by side in one buffer are kNone); with different
// strides, spans that meet count as kPartial.
inline Overlap overlap(const Rows& a, int64_t a_itemsize, const Rows& b, int64_t b_itemsize,
                       const Shape& shape) {
  const auto distance = static_cast<const char*>(b.data) - static_cast<const char*>(a.data);
  if (distance >= span_bytes(a, shape, a_itemsize) || -distance >= span_bytes(b, shape, b_itemsize))
    return Overlap::kNone;

  const int64_t inner = a.inner_stride * a_itemsize, outer = a.outer_stride * a_itemsize;
  const bool same_strides = inner == b.inner_stride * b_itemsize && outer == b.outer_stride * b_itemsize;
  if (!same_strides) return Overlap::kPartial;
  if (distance == 0 && a_itemsize == b_itemsize) return Overlap::kSame;

  const int64_t a_row = shape.cols * a_itemsize, b_row = shape.cols * b_itemsize;
  if (inner > 0 && outer % inner == 0 && !intervals_meet(distance, a_row, b_row, inner))
    return Overlap::kNone;
  const int64_t block = (shape.inner_rows - 1) * inner;
  if (!intervals_meet(distance, block + a_row, block + b_row, outer)) return Overlap::kNone;
  return Overlap::kPartial;
}

}  // namespace fused
