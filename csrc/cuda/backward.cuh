// The arithmetic of the backward, shared by its kernels so that a row's bits are the same in each: products
// and sums are spelled out, since the compiler may fuse a * b + c in one kernel and not in another.
#pragma once

#include "cuda/vectors.cuh"

namespace fused::cuda {

__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double multiply(double a, double b) { return __dmul_rn(a, b); }

// One vector's part of sum(dy * w * h).
template <int N, class A>
__device__ __forceinline__ A weighted_product(const A (&dy)[N], const A (&h)[N], const A (&w)[N]) {
  A sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) sum = fma(multiply(dy[i], w[i]), h[i], sum);
  return sum;
}

// mean(dy * w * n) from that sum.
template <class A>
__device__ __forceinline__ A mean_projection(A sum, A rstd, A inverse_cols) {
  return multiply(multiply(sum, rstd), inverse_cols);
}

template <int N, class A>
__device__ __forceinline__ void add_weight_gradient(A (&grad_weight)[N], const A (&dy)[N], const A (&h)[N],
                                                    A rstd) {
#pragma unroll
  for (int i = 0; i < N; ++i) grad_weight[i] = fma(dy[i], multiply(h[i], rstd), grad_weight[i]);
}

// dx, over dh (zeros where there is none).
template <int N, class A>
__device__ __forceinline__ void input_gradient(A (&dx)[N], const A (&dy)[N], const A (&h)[N], const A (&w)[N],
                                               A rstd, A projection) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    dx[i] = fma(rstd, fma(-multiply(h[i], rstd), projection, multiply(dy[i], w[i])), dx[i]);
  }
}

template <class G, class A>
__device__ __forceinline__ void store_rounded(G* to, A value) {
  if constexpr (std::is_same_v<G, Half>) {
    *to = __float2half_rn(static_cast<float>(value));
  } else if constexpr (std::is_same_v<G, BFloat16>) {
    *to = __float2bfloat16_rn(static_cast<float>(value));
  } else {
    *to = static_cast<G>(value);
  }
}

// Calls f with grad_weight as a pointer to its elements.
template <class F>
__device__ __forceinline__ void with_grad_weight(const BackwardParams& p, F f) {
  switch (p.grad_weight_dtype) {
    case DType::kHalf:
      return f(static_cast<Half*>(p.grad_weight));
    case DType::kBFloat16:
      return f(static_cast<BFloat16*>(p.grad_weight));
    case DType::kFloat:
      return f(static_cast<float*>(p.grad_weight));
    case DType::kDouble:
      return f(static_cast<double*>(p.grad_weight));
  }
}

// Adds up the parts of grad_weight that a block's teams have, team after team, and stores them: as columns
// [slice_col, slice_col + slice_cols) of a row of partial sums or, where there are no partial sums, of
// grad_weight, tensors that start on 16 bytes. All threads of the block take part; each has a run of its
// team's `slice` columns, from col_of_slice on. `shared`: teams * slice sums, in memory that nobody uses any
// more.
template <bool Aligned, int V, int N, class A>
__device__ __forceinline__ void add_teams(const BackwardParams& p, A* partials, int slice_col, int slice_cols,
                                          const A (&grad_weight)[V][N], unsigned char* shared, int team,
                                          int teams, int slice, int col_of_slice) {
  constexpr int K = kVectorElements<A>;
  A* sums = reinterpret_cast<A*>(shared);
  __syncthreads();
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const Words<A, N> words = pack<A, N>(grad_weight[v]);
    char* at = reinterpret_cast<char*>(sums + team * slice + col_of_slice + v * kWarp * N);
#pragma unroll
    for (int i = 0; i < Words<A, N>::kCount; i += kBlockWords) store_block(at + 4 * i, words.word + i);
  }
  __syncthreads();
  const auto store = [&](auto* to) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    for (int col = thread * K; col < slice_cols; col += blockDim.x * blockDim.y * K) {
      A sum[K], part[K];
      unpack(load_part<true, A, K>(sums + col, 0, K), sum);
      for (int other = 1; other < teams; ++other) {
        unpack(load_part<true, A, K>(sums + other * slice + col, 0, K), part);
#pragma unroll
        for (int i = 0; i < K; ++i) sum[i] += part[i];
      }
      auto* at = to + slice_col + col;
      if constexpr (Aligned && std::is_same_v<decltype(at), A*>) {  // whole blocks: both are our own tensors
        store_block(reinterpret_cast<char*>(at), pack<A, K>(sum).word);
      } else {
#pragma unroll
        for (int i = 0; i < K; ++i) {
          if (col + i < slice_cols) store_rounded(at + i, sum[i]);
        }
      }
    }
  };
  partials != nullptr ? store(partials) : with_grad_weight(p, store);
}

}  // namespace fused::cuda
