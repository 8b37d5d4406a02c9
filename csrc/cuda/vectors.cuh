// Vectors of elements: conversions, and loads and stores at any address.
//
// A vector is N neighbouring elements that one thread owns, 16 bytes of the narrowest tensor. Tensors whose
// rows start on 16 bytes are accessed in whole vectors. Others still are, at the 16-byte blocks around them:
// a load reads the blocks its elements lie in and shifts; a store takes the first bytes of its first block
// from the lane before it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "params.h"

namespace fused::cuda {

using Half = __half;
using BFloat16 = __nv_bfloat16;

template <class T>
using Accumulate = std::conditional_t<std::is_same_v<T, double>, double, float>;

constexpr int kWarp = 32;
constexpr int kBlockBytes = 16;  // the widest access of a thread
constexpr unsigned kAllLanes = 0xffffffffu;

template <int Value>
using Constant = std::integral_constant<int, Value>;

template <class T>
constexpr int kVectorElements = kBlockBytes / sizeof(T);

// --- Conversions -----------------------------------------------------------

// N elements of T as the 32-bit words they are loaded and stored in.
template <class T, int N>
struct Words {
  static constexpr int kCount = N * sizeof(T) / 4;
  uint32_t word[kCount];
};

template <class T, int N, class A>
__device__ __forceinline__ void unpack(const Words<T, N>& words, A (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (std::is_same_v<T, double>) {
      values[i] = __hiloint2double(words.word[2 * i + 1], words.word[2 * i]);
    } else if constexpr (std::is_same_v<T, float>) {
      values[i] = __uint_as_float(words.word[i]);
    } else if constexpr (std::is_same_v<T, BFloat16>) {
      const uint32_t word = words.word[i / 2];
      values[i] = __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
    } else {
      const uint32_t word = words.word[i / 2];
      values[i] = __half2float(__ushort_as_half(i % 2 ? word >> 16 : word & 0xffffu));
    }
  }
}

template <class T, int N, class A>
__device__ __forceinline__ Words<T, N> pack(const A (&values)[N]) {
  Words<T, N> words;
  if constexpr (std::is_same_v<T, double>) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      words.word[2 * i] = __double2loint(values[i]);
      words.word[2 * i + 1] = __double2hiint(values[i]);
    }
  } else if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < N; ++i) words.word[i] = __float_as_uint(values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      if constexpr (std::is_same_v<T, BFloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
        words.word[i] = __bfloat16_as_ushort(pair.x) | static_cast<uint32_t>(__bfloat16_as_ushort(pair.y))
                                                           << 16;
      } else {
        const __half2 pair = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
        words.word[i] = __half_as_ushort(pair.x) | static_cast<uint32_t>(__half_as_ushort(pair.y)) << 16;
      }
    }
  }
  return words;
}

// Element i of the words, as bits.
template <class T, int N>
__device__ __forceinline__ auto element(const Words<T, N>& words, int i) {
  if constexpr (sizeof(T) == 8) {
    return static_cast<uint64_t>(words.word[2 * i + 1]) << 32 | words.word[2 * i];
  } else if constexpr (sizeof(T) == 4) {
    return words.word[i];
  } else {
    return static_cast<uint16_t>(words.word[i / 2] >> (i % 2 * 16));
  }
}

// --- Memory ----------------------------------------------------------------

// Moves an array of words down by `bytes` (0 to 15); the vacated end is garbage. Selects rather than
// branches, so that the array stays in registers.
template <int Count>
__device__ __forceinline__ void shift_down(uint32_t (&word)[Count], int bytes) {
#pragma unroll
  for (int i = 0; i + 2 < Count; ++i) word[i] = bytes & 8 ? word[i + 2] : word[i];
#pragma unroll
  for (int i = 0; i + 1 < Count; ++i) word[i] = bytes & 4 ? word[i + 1] : word[i];
#pragma unroll
  for (int i = 0; i + 1 < Count; ++i) word[i] = __funnelshift_r(word[i], word[i + 1], bytes % 4 * 8);
}

__device__ __forceinline__ int misalignment(const void* pointer) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(pointer) % kBlockBytes);
}

__device__ __forceinline__ void load_block(const char* from, uint32_t* word) {
  const uint4 block = *reinterpret_cast<const uint4*>(from);
  word[0] = block.x;
  word[1] = block.y;
  word[2] = block.z;
  word[3] = block.w;
}

__device__ __forceinline__ void store_block(char* to, const uint32_t* word) {
  *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
}

// The vector at `from`, of which the first `remaining` elements (any sign) belong to the row; the others are
// zeros.
template <bool Aligned, class T, int N>
__device__ __forceinline__ Words<T, N> load(const T* from, int remaining) {
  constexpr int kBlocks = N * sizeof(T) / kBlockBytes;
  Words<T, N> words = {};
  if (remaining <= 0) return words;
  const auto* bytes = reinterpret_cast<const char*>(from);
  const int shift = Aligned ? 0 : misalignment(from);
  if (Aligned || (shift == 0 && remaining >= N)) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) load_block(bytes + i * kBlockBytes, words.word + 4 * i);
    return words;
  }
  const int own = min(remaining, N) * static_cast<int>(sizeof(T));
  uint32_t around[4 * (kBlocks + 1)] =
      {};  // a block without an element of ours may lie outside the allocation
#pragma unroll
  for (int i = 0; i <= kBlocks; ++i) {
    if (i * kBlockBytes < shift + own) load_block(bytes - shift + i * kBlockBytes, around + 4 * i);
  }
  shift_down(around, shift);
#pragma unroll
  for (int i = 0; i < Words<T, N>::kCount; ++i) words.word[i] = around[i];
  if (remaining < N) {
#pragma unroll
    for (int i = 0; i < Words<T, N>::kCount; ++i) {
      const int valid = own - 4 * i;  // bytes of this word
      words.word[i] = valid >= 4 ? around[i] : valid <= 0 ? 0u : around[i] & 0xffffu;
    }
  }
  return words;
}

// Stores elements [begin, end) of a vector, one by one.
template <class T, int N>
__device__ __forceinline__ void store_elements(T* to, int begin, int end, const Words<T, N>& words) {
  using Bits = decltype(element(words, 0));
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i >= begin && i < end) reinterpret_cast<Bits*>(to)[i] = element(words, i);
  }
}

// Stores a warp's run: V vectors a lane, each 32 lanes (N columns a lane) behind the one before, of which the
// first `remaining` elements from `to` on (any sign) belong to the row. `lane` counts within the `lanes` that
// share the row; all lanes of the warp take part.
template <bool Aligned, class T, int N, int V>
__device__ __forceinline__ void store_run(T* to, int remaining, const Words<T, N> (&run)[V], int lane,
                                          int lanes) {
  constexpr int kBlocks = N * sizeof(T) / kBlockBytes, kPerBlock = kVectorElements<T>, kStride = kWarp * N;
  const int shift = Aligned ? 0 : misalignment(to), ahead = shift / static_cast<int>(sizeof(T));
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const Words<T, N>& own = run[v];
    T* at = to + v * kStride;
    const int left = remaining - v * kStride;
    // The 16-byte blocks from the one that holds our first element on: they begin with the end of the vector
    // before, which the lane before has (the last lane's, of the run's vector before). Rows that share a warp
    // may be aligned differently.
    Words<T, N + kPerBlock> blocks;
    if constexpr (!Aligned) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int end = 4 * (kBlocks - 1) + i;
        const uint32_t give = v > 0 && lane == lanes - 1 ? run[v > 0 ? v - 1 : 0].word[end] : own.word[end];
        blocks.word[i] =
            __shfl_sync(kAllLanes, give, (threadIdx.y * blockDim.x + threadIdx.x + kWarp - 1) % kWarp);
      }
    }
    if (shift == 0 && left >= N) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
        store_block(reinterpret_cast<char*>(at) + i * kBlockBytes, own.word + 4 * i);
    }
    if constexpr (!Aligned) {
      if (shift == 0) {
        if (left < N) store_elements(at, 0, left, own);
        continue;
      }
#pragma unroll
      for (int i = 0; i < Words<T, N>::kCount; ++i) blocks.word[4 + i] = own.word[i];
      shift_down(blocks.word, kBlockBytes - shift);
      const bool has_before = v > 0 || lane > 0;
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const int begin = has_before ? 0 : ahead - i * kPerBlock, end = min(left, N) + ahead - i * kPerBlock;
        T* block = at - ahead + i * kPerBlock;
        if (begin <= 0 && end >= kPerBlock) {
          store_block(reinterpret_cast<char*>(block), blocks.word + 4 * i);
        } else {
          Words<T, kPerBlock> part;
#pragma unroll
          for (int j = 0; j < 4; ++j) part.word[j] = blocks.word[4 * i + j];
          store_elements(block, begin, end, part);
        }
      }
      if (v == V - 1 && lane == lanes - 1)
        store_elements(at, N - ahead, min(left, N), own);  // no lane behind it
    }
  }
}

// A row's place in the two levels of strides, found once for all tensors.
struct RowIndex {
  int64_t outer, inner;

  __device__ __forceinline__ RowIndex(const Shape& shape, int64_t row) : outer(0), inner(row) {
    if (shape.inner_rows != shape.rows) {  // spares a 64-bit division
      outer = row / shape.inner_rows;
      inner = row % shape.inner_rows;
    }
  }
};

template <class T>
__device__ __forceinline__ T* row_of(const Rows& rows, const RowIndex& row) {
  return static_cast<T*>(rows.data) + row.outer * rows.outer_stride + row.inner * rows.inner_stride;
}

// offset + weight of one vector; ones where there is no weight.
template <class W, int N, class A>
__device__ __forceinline__ void unpack_scale(const Words<W, N>& weight, bool has_weight, A offset,
                                             A (&values)[N]) {
  unpack(weight, values);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = has_weight ? values[i] + offset : A(1);
}

}  // namespace fused::cuda
