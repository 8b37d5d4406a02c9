// The sum over a row, in an order that depends on cols and the vector's width alone: not on the number of threads, of vectors a
// thread, of blocks a row or of rows, so that a row's bits are the same in every batch and on every kernel path.
//
// A chunk is 32 neighbouring vectors. A vector's products are added one after the other; a chunk's 32 sums by the butterfly (lane
// distance 16, 8, 4, 2, 1); and the chunks' sums so: lane l adds chunks l, l + 32, l + 64, ... one after the other, and the 32
// lanes' sums go through the butterfly again. Absent vectors and chunks count as zeros, which change no bit. Addition
// commutes, so it does not matter which lane of a pair adds.
#pragma once

#include "cuda/vectors.cuh"

namespace fused::cuda {

template <class A>
__device__ __forceinline__ A butterfly(A sum, int lanes) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    if (distance < lanes) sum += __shfl_xor_sync(kAllLanes, sum, distance);
  }
  return sum;
}

// The butterflies of V chunks at once, V a power of two: lanes exchange halves of what they hold, so V chunks take little more
// than one. Returns the sum of chunk `chunk_of_lane<V>(lane)`. V > 1 needs all 32 lanes in one row.
template <int V>
__device__ __forceinline__ int chunk_of_lane(int lane) {
  return lane / (kWarp / V);
}

template <int V, class A>
__device__ __forceinline__ A chunk_sums(A (&sums)[V], int lane, int lanes) {
  if constexpr (V == 1) {
    return butterfly(sums[0], lanes);
  } else {
    int held = V;
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      if (held > 1) {
        held /= 2;
        const bool upper = lane & distance;
#pragma unroll
        for (int i = 0; i < V / 2; ++i) {
          if (i >= held) break;
          const A keep = upper ? sums[i + held] : sums[i];
          const A give = upper ? sums[i] : sums[i + held];
          sums[i] = keep + __shfl_xor_sync(kAllLanes, give, distance);
        }
      } else {
        sums[0] += __shfl_xor_sync(kAllLanes, sums[0], distance);
      }
    }
    return sums[0];
  }
}

// The tree over chunks when one warp holds the whole row, as chunk_sums left them.
template <int V, class A>
__device__ __forceinline__ A add_chunks_in_warp(A sum) {
#pragma unroll
  for (int distance = kWarp / 2; distance >= kWarp / V && V > 1; distance /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
  }
  return sum;
}

// The tree over chunks whose sums are in shared memory; every warp gets the same bits.
template <class A>
__device__ __forceinline__ A add_chunks(const A* sums, int chunks, int lane) {
  A sum = 0;
  for (int chunk = lane; chunk < chunks; chunk += kWarp) sum += sums[chunk];
  return butterfly(sum, kWarp);
}

}  // namespace fused::cuda
