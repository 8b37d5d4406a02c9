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

}  // namespace fused::cuda
