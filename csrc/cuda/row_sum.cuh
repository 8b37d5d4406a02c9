// The sum over a row, in an order that depends on cols and the vector's width alone: not on the number of
// threads, of vectors a thread, of blocks a row or of rows, so that a row's bits are the same in every batch
// and on every kernel path.
//
// A chunk is 32 neighbouring vectors, an octet 8 neighbouring chunks. A vector's products are added one after
// the other; a chunk's 32 sums by the butterfly (lane distance 16, 8, 4, 2, 1); an octet's 8 by pairs
// ((0+1)+(2+3))+((4+5)+(6+7)); and the octets so: lane l adds octets l, l + 32, l + 64, ... one after the
// other, and the 32 lanes' sums go through the butterfly (1, 2, 4, 8, 16). Absent vectors, chunks and octets
// count as zeros, which change no bit. Addition commutes, so it does not matter which lane of a pair adds.
//
// A warp owns V neighbouring chunks, V a power of two up to 8, and forms their part of the octet: one number
// a warp is exchanged.
#pragma once

#include "cuda/vectors.cuh"

namespace fused::cuda {

constexpr int kOctet = 8;

// The sums of a warp's V chunks, added by pairs; every lane gets the bits. With fewer than 32 lanes to a row,
// V is 1.
template <int V, class A>
__device__ __forceinline__ A warp_sum(A (&sums)[V], int lane, int lanes) {
  int held =
      V;  // chunks whose sums this lane carries: lanes exchange halves, so V chunks take little more than one
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
      const A other = __shfl_xor_sync(kAllLanes, sums[0], distance);
      if (distance < lanes) sums[0] += other;
    }
  }
#pragma unroll
  for (int distance = kWarp / V; distance < kWarp; distance *= 2)
    sums[0] += __shfl_xor_sync(kAllLanes, sums[0], distance);
  return sums[0];
}

// Before the first barrier: zeros for the warps that the last octet lacks, by the first warp.
template <class A>
__device__ __forceinline__ void clear_absent_sums(A* sums, const SumLayout& layout, int thread) {
  if (thread < layout.slots - layout.warps) sums[layout.warps + thread] = 0;
  __syncwarp();  // its first lane speaks for it in a cluster's exchange
}

// The rest of the tree, from every warp's sum in shared memory. Each lane takes the octets congruent to its
// own number, so that all lanes get the bits.
template <int V, class A>
__device__ __forceinline__ A add_warp_sums(const A* sums, const SumLayout& layout, int lane) {
  constexpr int kPerOctet = kOctet / V, kBytes = kPerOctet * sizeof(A);
  struct alignas(kBytes < kBlockBytes ? kBytes : kBlockBytes) Octet {
    A sum[kPerOctet];
  };
  A total = 0;
#pragma unroll 1
  for (int octet = lane & (layout.lanes - 1); octet < layout.octets; octet += kWarp) {
    Octet parts = reinterpret_cast<const Octet*>(sums)[octet];
#pragma unroll
    for (int pairs = kPerOctet / 2; pairs > 0; pairs /= 2) {
#pragma unroll
      for (int i = 0; i < kPerOctet / 2; ++i) {
        if (i < pairs) parts.sum[i] = parts.sum[2 * i] + parts.sum[2 * i + 1];
      }
    }
    total += parts.sum[0];
  }
#pragma unroll 1
  for (int distance = 1; distance < layout.lanes; distance *= 2)
    total += __shfl_xor_sync(kAllLanes, total, distance);
  return total;
}

}  // namespace fused::cuda
