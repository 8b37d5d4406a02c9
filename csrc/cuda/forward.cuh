// The arithmetic of the forward, shared by its kernels.
#pragma once

#include "cuda/assembly.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/vectors.cuh"

namespace fused::cuda {

// One row's pointers, at a column.
template <class T, class R, class O>
struct ForwardRow {
  const T* input;
  const R* residual;
  R* residual_out;
  O* out;

  __device__ __forceinline__ ForwardRow(const ForwardParams& p, const RowIndex& row, int64_t col)
      : input(row_of<const T>(p.input, row) + col),
        residual(row_of<const R>(p.residual, row) + col),
        residual_out(row_of<R>(p.residual_out, row) + col),
        out(row_of<O>(p.out, row) + col) {}
};

// h of a run, as the statistics see it; `residual` becomes h as stored. Without a residual it is the input.
template <class T, class R, int N, int V, class A>
__device__ __forceinline__ void add(const Words<T, N> (&input)[V], Words<R, N> (&residual)[V],
                                    bool has_residual, bool round_sum, A (&h)[V][N]) {
  if (!has_residual) {
#pragma unroll
    for (int v = 0; v < V; ++v) unpack(input[v], h[v]);
    return;
  }
#pragma unroll
  for (int v = 0; v < V; ++v) {
    A addend[N];
    unpack(input[v], h[v]);
    unpack(residual[v], addend);
#pragma unroll
    for (int i = 0; i < N; ++i) h[v][i] += addend[i];
    residual[v] = pack<R, N>(h[v]);
  }
  if (!round_sum) return;
#pragma unroll
  for (int v = 0; v < V; ++v) unpack(residual[v], h[v]);
}

template <int N, class A>
__device__ __forceinline__ A sum_of_squares(const A (&h)[N]) {
  A sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) sum = fma(h[i], h[i], sum);
  return sum;
}

template <class A>
__device__ __forceinline__ A reciprocal_root(A sum, const Scalars<A>& scalars) {
  return rsqrt(fma(sum, scalars.inverse_cols, scalars.eps));
}

// The sum over a row from its warps' sums, of all its blocks.
template <int V, class A>
__device__ __forceinline__ A exchange(A warp_sum, A* sums, int warp, int lane, TransactionBarrier& exchanged,
                                      int cluster, const SumLayout& layout) {
  if (cluster > 1) {
    if (threadIdx.x == 0) exchanged.arrive_expecting(layout.warps * sizeof(A));
    if (lane < cluster) store_in_peer(sums + warp, warp_sum, exchanged, lane);
    exchanged.wait_for_peers(0);
  } else {
    if (lane == 0) sums[warp] = warp_sum;
    __syncthreads();
  }
  return add_warp_sums<V>(sums, layout, lane);
}

// out of a run of h, which is overwritten.
template <class R, class O, class W, int N, int V, class A>
__device__ __forceinline__ void normalize(A (&h)[V][N], A rstd, bool round_normalized,
                                          const Words<W, N> (&weight)[V], A offset, Words<O, N> (&out)[V]) {
#pragma unroll
  for (int v = 0; v < V; ++v) {
#pragma unroll
    for (int i = 0; i < N; ++i) h[v][i] *= rstd;
  }
  if (round_normalized) {
#pragma unroll
    for (int v = 0; v < V; ++v) unpack(pack<R, N>(h[v]), h[v]);
  }
#pragma unroll
  for (int v = 0; v < V; ++v) {
    A scale[N];
    unpack_scale(weight[v], offset, scale);
#pragma unroll
    for (int i = 0; i < N; ++i) h[v][i] *= scale[i];
    out[v] = pack<O, N>(h[v]);
  }
}

}  // namespace fused::cuda
