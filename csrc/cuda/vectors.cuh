// Vectors of elements: conversions, and loads and stores at any address.
//
// A vector is N neighbouring elements that one thread owns, 16 bytes of the narrowest tensor. Tensors whose
// rows start on 16 bytes are accessed in whole vectors. Others still are, at the 16-byte blocks around them:
// a load reads the blocks its elements lie in and shifts; a store takes the first bytes of its first block
// from the lane before it. Or a kernel forms vectors that start on 16 bytes of where they are stored
// (load_part, store_part).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/config.h"
#include "params.h"

namespace fused::cuda {

using Half = __half;
using BFloat16 = __nv_bfloat16;

template <class T>
using Accumulate = std::conditional_t<std::is_same_v<T, double>, double, float>;

// A call's scalars in the type that is computed in, made by the host: a division and a conversion from fp64
// take a GPU as long as a row's sum.
template <class A>
struct Scalars {
  A inverse_cols, eps;
  A offset;  // one where there is no weight, which is read as zeros

  Scalars(const Shape& shape, const Weight& weight, double offset, double eps = 0)
      : inverse_cols(A(1) / static_cast<A>(shape.cols)),
        eps(static_cast<A>(eps)),
        offset(weight.data == nullptr ? A(1) : static_cast<A>(offset)) {}
};

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

// The same bits, without taking the parts of a pair asunder.
template <class To, class From>
__device__ __forceinline__ To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

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
      const __half2 pair = bits_as<__half2>(words.word[i / 2]);
      values[i] = i % 2 ? __high2float(pair) : __low2float(pair);
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
        words.word[i] = bits_as<uint32_t>(__floats2bfloat162_rn(values[2 * i], values[2 * i + 1]));
      } else {
        words.word[i] = bits_as<uint32_t>(__floats2half2_rn(values[2 * i], values[2 * i + 1]));
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

__device__ __forceinline__ int misalignment(const void* pointer) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(pointer) % kBlockBytes);
}

// Bytes from the start of the pointer's line of memory.
__device__ __forceinline__ int within_line(const void* pointer) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(pointer) % kLineBytes);
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

constexpr int kBlockWords = kBlockBytes / 4;

template <int Skip, int V, int In, class T, int N>
__device__ __forceinline__ void shift_down_by(const uint32_t (&in)[V][In], int bits, Words<T, N> (&out)[V]) {
#pragma unroll
  for (int v = 0; v < V; ++v) {
#pragma unroll
    for (int i = 0; i < Words<T, N>::kCount; ++i) {
      const uint32_t low = in[v][i + Skip], high = i + Skip + 1 < In ? in[v][i + Skip + 1] : 0u;
      out[v].word[i] = sizeof(T) < 4 ? __funnelshift_r(low, high, bits) : low;
    }
  }
}

// The words of V vectors from byte `bytes` (0 to 16) on. That is the same number in a whole row, and whole
// words of it are left out by a branch, which costs less than selecting every word.
template <int V, int In, class T, int N>
__device__ __forceinline__ void shift_down(const uint32_t (&in)[V][In], int bytes, Words<T, N> (&out)[V]) {
  const int bits = bytes % 4 * 8;
  switch (bytes / 4) {
    case 0:
      return shift_down_by<0>(in, bits, out);
    case 1:
      return shift_down_by<1>(in, bits, out);
    case 2:
      return shift_down_by<2>(in, bits, out);
    case 3:
      return shift_down_by<3>(in, bits, out);
    default:
      return shift_down_by<4>(in, bits, out);
  }
}

// A warp's run is V vectors a lane, each 32 lanes (N columns a lane) behind the one before. Of the elements
// from the lane's first on, `remaining` (any number) belong to the row.

// That number for a lane whose first column is `col`, as far as a run of one vector a lane tells numbers
// apart: rows may have more columns than an int counts.
template <int N>
__device__ __forceinline__ int remaining_in_row(int64_t cols, int64_t col) {
  constexpr int64_t kRun = kWarp * N;
  return static_cast<int>(max(min(cols - col, kRun), -kRun));
}

// The first vectors of a run.
template <int Count, class T, int N, int V>
__device__ __forceinline__ Words<T, N> (&first(Words<T, N> (&run)[V]))[Count] {
  static_assert(Count <= V);
  return reinterpret_cast<Words<T, N>(&)[Count]>(run);
}

// A run as it is loaded: unaligned, the blocks around each vector.
template <bool Aligned, class T, int N, int V>
struct Fetched {
  uint32_t word[V][Words<T, N>::kCount + (Aligned ? 0 : kBlockWords)];
};

// Padded: memory, such as a stage of shared memory, that may be read for a block beyond any run's end.
template <bool Padded = false, bool Aligned, class T, int N, int V>
__device__ __forceinline__ void fetch_run(const T* from, int remaining, Fetched<Aligned, T, N, V>& run) {
  constexpr int kBlocks = sizeof(run.word[0]) / kBlockBytes;
  const int shift = Aligned ? 0 : misalignment(from);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int left = remaining - v * kWarp * N, end = shift + min(left, N) * static_cast<int>(sizeof(T));
    const char* block = reinterpret_cast<const char*>(from + v * kWarp * N) - shift;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      uint32_t* word = run.word[v] + i * kBlockWords;
      if (!Padded) word[0] = word[1] = word[2] = word[3] = 0;
      // A block without an element of ours may lie outside the allocation.
      if (Padded || (Aligned || i == 0 ? left > 0 : i * kBlockBytes < end))
        load_block(block + i * kBlockBytes, word);
    }
  }
}

// The vectors of a run that was fetched from the same place; elements beyond the row's end are zeros, but for
// aligned ones in padded memory, which are whatever is there.
template <bool Aligned, class T, int N, int V>
__device__ __forceinline__ void align_run(const Fetched<Aligned, T, N, V>& fetched, const T* from,
                                          int remaining, Words<T, N> (&run)[V]) {
  if constexpr (Aligned) {
    shift_down_by<0>(fetched.word, 0, run);
  } else {
    shift_down(fetched.word, misalignment(from), run);
    if (remaining >= ((V - 1) * kWarp + 1) * N) return;
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int i = 0; i < Words<T, N>::kCount; ++i) {
        // Bytes of the row from this word on.
        const int left = (remaining - v * kWarp * N) * static_cast<int>(sizeof(T)) - 4 * i;
        if (left < 4) run[v].word[i] = left <= 0 ? 0u : run[v].word[i] & 0xffffu;
      }
    }
  }
}

template <bool Aligned, bool Padded = false, class T, int N, int V>
__device__ __forceinline__ void load_run(const T* from, int remaining, Words<T, N> (&run)[V]) {
  Fetched<Aligned, T, N, V> fetched;
  fetch_run<Padded>(from, remaining, fetched);
  align_run(fetched, from, remaining, run);
}

template <bool Aligned, class T, int N>
__device__ __forceinline__ Words<T, N> load(const T* from, int remaining) {
  Words<T, N> run[1];
  load_run<Aligned>(from, remaining, run);
  return run[0];
}

// Stores elements [begin, end) of a block, one by one.
template <class T>
__device__ __forceinline__ void store_elements(T* to, int begin, int end, const uint32_t* block) {
  Words<T, kVectorElements<T>> words;
#pragma unroll
  for (int i = 0; i < kBlockWords; ++i) words.word[i] = block[i];
  using Bits = decltype(element(words, 0));
#pragma unroll
  for (int i = 0; i < kVectorElements<T>; ++i) {
    if (i >= begin && i < end) reinterpret_cast<Bits*>(to)[i] = element(words, i);
  }
}

// A vector at any address, of which elements [begin, end) belong to the tensor; the others are unspecified.
template <bool Aligned, class T, int N>
__device__ __forceinline__ Words<T, N> load_part(const T* from, int begin, int end) {
  constexpr int kSize = sizeof(T), kCount = Words<T, N>::kCount + (Aligned ? 0 : kBlockWords);
  const int shift = Aligned ? 0 : misalignment(from);
  const char* block = reinterpret_cast<const char*>(from) - shift;
  uint32_t words[1][kCount];
#pragma unroll
  for (int at = 0; at < kCount * 4; at += kBlockBytes) {
    uint32_t* word = words[0] + at / 4;
    word[0] = word[1] = word[2] = word[3] = 0;
    // A block without an element of the tensor may lie outside the allocation.
    if (at < shift + end * kSize && at + kBlockBytes > shift + begin * kSize) load_block(block + at, word);
  }
  Words<T, N> out[1];
  Aligned ? shift_down_by<0>(words, 0, out) : shift_down(words, shift, out);
  return out[0];
}

// Stores elements [begin, end) of a vector, at once where it is whole and starts on 16 bytes.
template <bool Aligned, class T, int N>
__device__ __forceinline__ void store_part(T* to, int begin, int end, const Words<T, N>& words) {
  constexpr int kPerBlock = kVectorElements<T>;
  const bool whole = begin <= 0 && end >= N && (Aligned || misalignment(to) == 0);
#pragma unroll
  for (int i = 0; i < N / kPerBlock; ++i) {
    T* block = to + i * kPerBlock;
    const uint32_t* word = words.word + i * kBlockWords;
    if (whole) {
      store_block(reinterpret_cast<char*>(block), word);
    } else {
      store_elements(block, begin - i * kPerBlock, end - i * kPerBlock, word);
    }
  }
}

// Stores a warp's run; all its lanes take part. `lane` counts within the `lanes` that share the row.
// Unaligned, a lane stores the blocks from the one with its first element on: they begin with the end of the
// vector before, which the lane before has (the last lane's, of the run's vector before). The first lane's
// first block begins with the run's end instead: it holds both ends of the run, which are stored element by
// element, spread over the lanes.
template <bool Aligned, class T, int N, int V>
__device__ __forceinline__ void store_run(T* to, int remaining, const Words<T, N> (&run)[V], int lane,
                                          int lanes) {
  constexpr int kCount = Words<T, N>::kCount, kBlocks = kCount / kBlockWords, kPerBlock = kVectorElements<T>;
  if constexpr (Aligned) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      char* at = reinterpret_cast<char*>(to + v * kWarp * N);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (remaining - v * kWarp * N > 0) store_block(at + i * kBlockBytes, run[v].word + i * kBlockWords);
      }
    }
  } else {
    const int shift = misalignment(to), ahead = shift / static_cast<int>(sizeof(T));
    const int first_lane = (threadIdx.y * blockDim.x + threadIdx.x) % kWarp - lane;
    const int lane_before = first_lane + (lane > 0 ? lane : lanes) - 1;
    uint32_t both[V][kBlockWords + kCount];  // the end of the vector before, and the lane's own
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int i = 0; i < kBlockWords; ++i) {
        const int end = kCount - kBlockWords + i;
        const uint32_t give = lane == lanes - 1 ? run[(v + V - 1) % V].word[end] : run[v].word[end];
        both[v][i] = __shfl_sync(kAllLanes, give, lane_before);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) both[v][kBlockWords + i] = run[v].word[i];
    }
    Words<T, N> shifted[V];
    shift_down(both, kBlockBytes - shift, shifted);
    Words<T, kPerBlock> ends;  // of the run: its last `ahead` elements, and its first ones
#pragma unroll
    for (int i = 0; i < kBlockWords; ++i)
      ends.word[i] = __shfl_sync(kAllLanes, shifted[0].word[i], first_lane);
    for (int at = lane; at < kPerBlock; at += lanes) {
      auto bits = element(ends, 0);
#pragma unroll
      for (int i = 1; i < kPerBlock; ++i) bits = at == i ? element(ends, i) : bits;
      const int col = at - ahead + (at < ahead ? ((V - 1) * kWarp + lanes) * N : 0) - lane * N;
      if (col < remaining) reinterpret_cast<decltype(bits)*>(to)[col] = bits;
    }
    // From the address of a whole block, or the compiler takes a block's stores asunder.
    char* first_block = reinterpret_cast<char*>(to) - shift;
    // Calls f(block, words, elements of the row from the block's start on) for the lane's blocks.
    const auto for_blocks = [&](auto f) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          const int col = v * kWarp * N + i * kPerBlock;
          if (v > 0 || i > 0 || lane > 0) {
            f(first_block + col * static_cast<int>(sizeof(T)), shifted[v].word + i * kBlockWords,
              remaining + ahead - col);
          }
        }
      }
    };
    for_blocks([](char* block, const uint32_t* word, int left) {
      if (left >= kPerBlock) store_block(block, word);
    });
    if (remaining + ahead < ((V - 1) * kWarp + 1) * N) {  // the row ends here
      for_blocks([](char* block, const uint32_t* word, int left) {
        if (left < kPerBlock) store_elements(reinterpret_cast<T*>(block), 0, left, word);
      });
    }
  }
}

// By a power of two, such as a cluster's size.
__device__ __forceinline__ unsigned divide(unsigned value, int power) { return value >> (__ffs(power) - 1); }

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

// offset + weight of one vector.
template <class W, int N, class A>
__device__ __forceinline__ void unpack_scale(const Words<W, N>& weight, A offset, A (&values)[N]) {
  unpack(weight, values);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] += offset;
}

}  // namespace fused::cuda
