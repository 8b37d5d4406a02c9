// Backward for every GPU, address and H. Bytes per row: grad_out, residual_out and grad_residual_out read, the gradients written;
// a few persistent blocks an SM, so that grad_weight's partial sums stay in registers. (backward_ring.cu is faster where it can run.)
#include "cuda/backward.h"

#include "cuda/backward.cuh"
#include "cuda/hopper.cuh"
#include "cuda/launch.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/vectors.cuh"
#include "dispatch.h"

namespace fused::cuda {
namespace {

// One row's pointers, at a thread's first column.
template <class T, class R, class O>
struct BackwardRow {
  const O* grad_out;
  const R* residual_out;
  const R* grad_residual_out;
  T* grad_input;
  R* grad_residual;

  __device__ __forceinline__ BackwardRow(const BackwardParams& p, int64_t row, int64_t col)
      : grad_out(row_of<const O>(p.grad_out, p.shape, row) + col),
        residual_out(row_of<const R>(p.residual_out, p.shape, row) + col),
        grad_residual_out(row_of<const R>(p.grad_residual_out, p.shape, row) + col),
        grad_input(row_of<T>(p.grad_input, p.shape, row) + col),
        grad_residual(row_of<R>(p.grad_residual, p.shape, row) + col) {}
};

template <class A, int N>
__device__ __forceinline__ void store_partial(A* partials, int remaining, const A (&grad_weight)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < remaining) partials[i] = grad_weight[i];
  }
}

// A row in the registers of a block's `threads` threads.
template <class T, class R, class O, int V, bool Aligned>
__global__ void __launch_bounds__(256)
    backward_in_registers(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardConfig config, int chunks,
                          Accumulate<T>* partials) {
  using A = Accumulate<T>;
  constexpr int N = kVectorElements<T>;
  extern __shared__ __align__(16) unsigned char shared[];

  const int threads = config.threads, warps = threads / kWarp, lanes = min(threads, kWarp);
  const int thread = threadIdx.x, lane = (threadIdx.y * threads + thread) % kWarp;
  const bool first = thread % kWarp == 0, last = thread % kWarp == lanes - 1;
  const int cols = static_cast<int>(p.shape.cols), stride = threads * N, first_col = thread * N;
  const bool has_dh = p.grad_residual_out.data != nullptr;
  const bool wants_dx = p.grad_input.data != nullptr || p.grad_residual.data != nullptr;
  const Scale<A> scale{p.weight, static_cast<A>(p.offset)};

  launch_dependents();
  wait_for_predecessor();

  A grad_weight[V][N] = {};
  const int64_t step = static_cast<int64_t>(gridDim.x) * config.rows_per_block;
  int parity = 0;
  for (int64_t block_row = static_cast<int64_t>(blockIdx.x) * config.rows_per_block; block_row < p.shape.rows; block_row += step) {
    const int64_t row = block_row + threadIdx.y;
    const bool active = row < p.shape.rows;
    const auto remaining = [&](int v) { return active ? cols - first_col - v * stride : -N; };
    const BackwardRow<T, R, O> at(p, row, first_col);
    const A rstd = active ? static_cast<const A*>(p.rstd)[row] : A(0);

    Words<O, N> dy[V];
    Words<R, N> h[V], dh[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      dy[v] = load<Aligned, O, N>(at.grad_out + v * stride, remaining(v));
      h[v] = load<Aligned, R, N>(at.residual_out + v * stride, remaining(v));
      dh[v] = {};
      if (has_dh && wants_dx) dh[v] = load<Aligned, R, N>(at.grad_residual_out + v * stride, remaining(v));
    }

    A products[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      A dy_values[N], h_values[N], w[1][N];
      unpack(dy[v], dy_values);
      unpack(h[v], h_values);
      if (partials != nullptr) add_weight_gradient(grad_weight[v], dy_values, h_values, rstd);
      load_scale(scale, first_col + v * stride, stride, cols, w);
      products[v] = weighted_product(dy_values, h_values, w[0]);
    }
    if (!wants_dx) continue;

    A total = chunk_sums(products, lane, lanes);
    if (warps <= 1) {
      total = add_chunks_in_warp<V>(total);
    } else {
      // Two buffers: a warp may write the next row's sums while another still reads this row's.
      A* sums = reinterpret_cast<A*>(shared) + (parity * config.rows_per_block + threadIdx.y) * chunks;
      const int chunk = chunk_of_lane<V>(lane) * warps + thread / kWarp;
      if (lane % (kWarp / V) == 0 && chunk < chunks) sums[chunk] = total;
      __syncthreads();
      total = add_chunks(sums, chunks, lane);
      parity ^= 1;
    }
    const A projection = mean_projection(total, rstd, cols);

#pragma unroll
    for (int v = 0; v < V; ++v) {
      A dx[N], dy_values[N], h_values[N], w[1][N];
      unpack(dh[v], dx);
      unpack(dy[v], dy_values);
      unpack(h[v], h_values);
      load_scale(scale, first_col + v * stride, stride, cols, w);
      input_gradient(dx, dy_values, h_values, w[0], rstd, projection);
      if (p.grad_input.data != nullptr) {
        store<Aligned>(at.grad_input + v * stride, remaining(v), pack<T, N>(dx), first, last);
      }
      if (p.grad_residual.data != nullptr) {
        store<Aligned>(at.grad_residual + v * stride, remaining(v), pack<R, N>(dx), first, last);
      }
    }
  }

  if (partials != nullptr) {
    partials += (static_cast<int64_t>(blockIdx.x) * config.rows_per_block + threadIdx.y) * cols + first_col;
#pragma unroll
    for (int v = 0; v < V; ++v) store_partial(partials + v * stride, cols - first_col - v * stride, grad_weight[v]);
  }
}

// A row of any length, read twice; the partial sums of grad_weight are in global memory, each element owned by one thread.
template <class T, class R, class O, bool Aligned>
__global__ void __launch_bounds__(kMaxThreads)
    backward_in_a_loop(const __grid_constant__ BackwardParams p, Accumulate<T>* partials) {
  using A = Accumulate<T>;
  constexpr int N = kVectorElements<T>;
  constexpr int64_t kStep = static_cast<int64_t>(kMaxThreads) * N;
  __shared__ A sums[kWarp];
  const int lane = threadIdx.x % kWarp;
  const bool first = lane == 0, last = lane == kWarp - 1;
  const bool has_dh = p.grad_residual_out.data != nullptr;
  const bool wants_dx = p.grad_input.data != nullptr || p.grad_residual.data != nullptr;
  const Scale<A> scale{p.weight, static_cast<A>(p.offset)};
  const int64_t cols = p.shape.cols;
  const auto remaining = [&](int64_t col) { return static_cast<int>(max(min(cols - col, int64_t{N}), int64_t{-N})); };

  launch_dependents();
  wait_for_predecessor();

  if (partials != nullptr) partials += blockIdx.x * cols;
  for (int64_t row = blockIdx.x; row < p.shape.rows; row += gridDim.x) {
    const BackwardRow<T, R, O> at(p, row, 0);
    const A rstd = static_cast<const A*>(p.rstd)[row];
    A projection = 0;
    if (wants_dx) {
      A sum = 0;
#pragma unroll 4
      for (int64_t start = 0; start < cols; start += kStep) {
        const int64_t col = start + threadIdx.x * N;
        A dy[N], h[N], w[1][N];
        unpack(load<Aligned, O, N>(at.grad_out + col, remaining(col)), dy);
        unpack(load<Aligned, R, N>(at.residual_out + col, remaining(col)), h);
        load_scale(scale, col, kStep, cols, w);
        sum += butterfly(weighted_product(dy, h, w[0]), kWarp);
      }
      __syncthreads();  // the row before has been read
      if (lane == 0) sums[threadIdx.x / kWarp] = sum;
      __syncthreads();
      projection = mean_projection(add_chunks(sums, kWarp, lane), rstd, cols);
    }
    for (int64_t start = 0; start < cols; start += kStep) {
      const int64_t col = start + threadIdx.x * N;
      A dy[N], h[N];
      unpack(load<Aligned, O, N>(at.grad_out + col, remaining(col)), dy);
      unpack(load<Aligned, R, N>(at.residual_out + col, remaining(col)), h);
      if (partials != nullptr) {
        A grad_weight[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          grad_weight[i] = row >= gridDim.x && col + i < cols ? partials[col + i] : A(0);
        }
        add_weight_gradient(grad_weight, dy, h, rstd);
        store_partial(partials + col, remaining(col), grad_weight);
      }
      if (wants_dx) {
        A dx[N] = {}, w[1][N];
        if (has_dh) unpack(load<Aligned, R, N>(at.grad_residual_out + col, remaining(col)), dx);
        load_scale(scale, col, kStep, cols, w);
        input_gradient(dx, dy, h, w[0], rstd, projection);
        if (p.grad_input.data != nullptr) {
          store<Aligned>(at.grad_input + col, remaining(col), pack<T, N>(dx), first, last);
        }
        if (p.grad_residual.data != nullptr) {
          store<Aligned>(at.grad_residual + col, remaining(col), pack<R, N>(dx), first, last);
        }
      }
    }
  }
}

// A warp's lanes take neighbouring columns, its block's warps the partial rows; their sums are added in a fixed order.
template <class A, class W>
__global__ void __launch_bounds__(kMaxThreads)
    finish_grad_weight(const A* partials, int64_t partial_rows, int64_t cols, W* grad_weight) {
  __shared__ A sums[kWarp][kWarp + 1];
  launch_dependents();
  wait_for_predecessor();
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  A sum = 0;
  if (col < cols) {
#pragma unroll 4
    for (int64_t row = threadIdx.y; row < partial_rows; row += kWarp) sum += partials[row * cols + col];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  const int64_t out_col = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.y;
  const A total = butterfly(sums[threadIdx.x][threadIdx.y], kWarp);
  if (threadIdx.x == 0 && out_col < cols) {
    if constexpr (std::is_same_v<W, Half>) {
      grad_weight[out_col] = __float2half_rn(static_cast<float>(total));
    } else if constexpr (std::is_same_v<W, BFloat16>) {
      grad_weight[out_col] = __float2bfloat16_rn(static_cast<float>(total));
    } else {
      grad_weight[out_col] = static_cast<W>(total);
    }
  }
}

}  // namespace

cudaError_t launch_backward(const BackwardParams& p, const BackwardConfig& config, void* grad_weight_partials, bool aligned,
                            const Gpu& gpu, int device, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  dispatch_dtypes<Half, BFloat16>(p.input_dtype, p.residual_dtype, p.out_dtype, [&](auto t, auto r, auto o) {
    using T = decltype(t);
    using R = decltype(r);
    using O = decltype(o);
    using A = Accumulate<T>;
    auto* partials = static_cast<A*>(grad_weight_partials);
    const auto dispatch_alignment = [&](auto is_aligned) {
      constexpr bool kAligned = decltype(is_aligned)::value;
      Launch how;
      how.threads = dim3(config.threads, config.rows_per_block);
      how.blocks = backward_blocks(config, p.shape.rows, gpu);
      how.dependent = gpu.hopper;
      how.device = device;
      how.stream = stream;
      const int chunks = static_cast<int>(div_up(p.shape.cols, kVectorElements<T> * kWarp));
      how.shared_bytes = 2 * config.rows_per_block * chunks * static_cast<int>(sizeof(A));
      const auto launch_as = [&](auto vectors) {
        error = launch<backward_in_registers<T, R, O, decltype(vectors)::value, kAligned>>(how, p, config, chunks, partials);
      };
      switch (config.vectors_per_thread) {
        case 0:
          how.shared_bytes = 0;
          error = launch<backward_in_a_loop<T, R, O, kAligned>>(how, p, partials);
          return;
        case 1: return launch_as(Constant<1>());
        case 2: return launch_as(Constant<2>());
        default: return launch_as(Constant<4>());
      }
    };
    aligned ? dispatch_alignment(std::true_type()) : dispatch_alignment(std::false_type());
  });
  return error;
}

cudaError_t launch_finish_grad_weight(const BackwardParams& p, const void* partials, int64_t partial_rows, const Gpu& gpu,
                                      int device, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  dispatch_dtype<Half, BFloat16>(p.weight.dtype, [&](auto w) {
    using W = decltype(w);
    Launch how;
    how.blocks = div_up(p.shape.cols, kWarp);
    how.threads = dim3(kWarp, kWarp);
    how.dependent = gpu.hopper;
    how.device = device;
    how.stream = stream;
    auto* grad_weight = static_cast<W*>(p.grad_weight);
    error = p.input_dtype == DType::kDouble
                ? launch<finish_grad_weight<double, W>>(how, static_cast<const double*>(partials), partial_rows, p.shape.cols,
                                                        grad_weight)
                : launch<finish_grad_weight<float, W>>(how, static_cast<const float*>(partials), partial_rows, p.shape.cols,
                                                       grad_weight);
  });
  return error;
}

}  // namespace fused::cuda
