// Backward for every GPU, address and H. Bytes per row: grad_out, residual_out and grad_residual_out read,
// the gradients written; a few persistent blocks an SM, so that grad_weight's partial sums stay in registers.
// (backward_ring.cu is faster where it can run.)
#include "cuda/assembly.cuh"
#include "cuda/backward.cuh"
#include "cuda/backward.h"
#include "cuda/launch.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/vectors.cuh"
#include "dispatch.h"

namespace fused::cuda {
namespace {

constexpr int kFinishWarps = 16;

// One row's pointers, at a thread's first column.
template <class T, class R, class O>
struct BackwardRow {
  const O* grad_out;
  const R* residual_out;
  const R* grad_residual_out;
  T* grad_input;
  R* grad_residual;

  __device__ __forceinline__ BackwardRow(const BackwardParams& p, const RowIndex& row, int64_t col)
      : grad_out(row_of<const O>(p.grad_out, row) + col),
        residual_out(row_of<const R>(p.residual_out, row) + col),
        grad_residual_out(row_of<const R>(p.grad_residual_out, row) + col),
        grad_input(row_of<T>(p.grad_input, row) + col),
        grad_residual(row_of<R>(p.grad_residual, row) + col) {}
};

template <class A, int N>
__device__ __forceinline__ void store_partial(A* partials, int remaining, const A (&grad_weight)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < remaining) partials[i] = grad_weight[i];
  }
}

// A row in the registers of a block's `threads` threads.
template <class T, class R, class O, class W, int V, bool Aligned>
__global__ void __launch_bounds__(256)
    backward_in_registers(const __grid_constant__ BackwardParams p,
                          const __grid_constant__ BackwardConfig config,
                          const __grid_constant__ SumLayout layout, Accumulate<T>* partials) {
  using A = Accumulate<T>;
  constexpr int N = kVectorElements<T>,
                kStride = kWarp * N;  // columns from one of a thread's vectors to the next
  FUSED_DYNAMIC_SHARED(shared);

  const int threads = config.threads, lanes = min(threads, kWarp), thread = threadIdx.x,
            warp = thread / kWarp;
  const int lane = (threadIdx.y * threads + thread) % kWarp;
  const int cols = static_cast<int>(p.shape.cols), first_col = (warp * V * kWarp + thread % kWarp) * N;
  const bool has_dh = p.grad_residual_out.data != nullptr;
  const bool wants_dx = p.grad_input.data != nullptr || p.grad_residual.data != nullptr;
  const bool has_weight = p.weight.data != nullptr;
  const W* weight = static_cast<const W*>(p.weight.data) + first_col;
  const A inverse_cols = A(1) / static_cast<A>(cols), offset = static_cast<A>(p.offset);

  launch_dependents();
  wait_for_predecessor();

  Words<W, N> w[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    w[v] = load<Aligned, W, N>(weight + v * kStride, has_weight ? cols - first_col - v * kStride : 0);
  }
  A grad_weight[V][N] = {};
  const int64_t step = static_cast<int64_t>(gridDim.x) * config.rows_per_block;
  int parity = 0;
  for (int64_t block_row = static_cast<int64_t>(blockIdx.x) * config.rows_per_block; block_row < p.shape.rows;
       block_row += step) {
    const int64_t row = block_row + threadIdx.y;
    const bool active = row < p.shape.rows;
    const auto remaining = [&](int v) { return (active ? cols - first_col : -N) - v * kStride; };
    const BackwardRow<T, R, O> at(p, RowIndex(p.shape, row), first_col);
    const A rstd = active ? static_cast<const A*>(p.rstd)[row] : A(0);

    Words<O, N> dy[V];
    Words<R, N> h[V], dh[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      dy[v] = load<Aligned, O, N>(at.grad_out + v * kStride, remaining(v));
      h[v] = load<Aligned, R, N>(at.residual_out + v * kStride, remaining(v));
      dh[v] = {};
      if (has_dh && wants_dx) dh[v] = load<Aligned, R, N>(at.grad_residual_out + v * kStride, remaining(v));
    }

    A products[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      A dy_values[N], h_values[N], scale[N];
      unpack(dy[v], dy_values);
      unpack(h[v], h_values);
      unpack_scale(w[v], has_weight, offset, scale);
      if (partials != nullptr) add_weight_gradient(grad_weight[v], dy_values, h_values, rstd);
      products[v] = weighted_product(dy_values, h_values, scale);
    }
    if (!wants_dx) continue;

    A total = warp_sum(products, lane, lanes);
    if (threads > kWarp) {
      // Two buffers: a warp may write the next row's sums while another still reads this row's.
      A* sums = reinterpret_cast<A*>(shared) + (parity * config.rows_per_block + threadIdx.y) * layout.warps;
      if (lane == 0 && warp < layout.warps) sums[warp] = total;
      __syncthreads();
      total = add_warp_sums<V>(sums, layout, lane);
      parity ^= 1;
    }
    const A projection = mean_projection(total, rstd, inverse_cols);

    Words<T, N> grad_input[V];
    Words<R, N> grad_residual[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      A dx[N], dy_values[N], h_values[N], scale[N];
      unpack(dh[v], dx);
      unpack(dy[v], dy_values);
      unpack(h[v], h_values);
      unpack_scale(w[v], has_weight, offset, scale);
      input_gradient(dx, dy_values, h_values, scale, rstd, projection);
      grad_input[v] = pack<T, N>(dx);
      grad_residual[v] = pack<R, N>(dx);
    }
    const int lane_of_row = thread % kWarp;
    if (p.grad_input.data != nullptr)
      store_run<Aligned>(at.grad_input, remaining(0), grad_input, lane_of_row, lanes);
    if (p.grad_residual.data != nullptr)
      store_run<Aligned>(at.grad_residual, remaining(0), grad_residual, lane_of_row, lanes);
  }

  if (partials != nullptr) {
    partials += (static_cast<int64_t>(blockIdx.x) * config.rows_per_block + threadIdx.y) * cols + first_col;
#pragma unroll
    for (int v = 0; v < V; ++v)
      store_partial(partials + v * kStride, cols - first_col - v * kStride, grad_weight[v]);
  }
}

// A row of any length, read twice; the partial sums of grad_weight are in global memory, each element owned
// by one thread.
template <class T, class R, class O, class W, bool Aligned>
__global__ void __launch_bounds__(kMaxThreads)
    backward_in_a_loop(const __grid_constant__ BackwardParams p, Accumulate<T>* partials) {
  using A = Accumulate<T>;
  constexpr int N = kVectorElements<T>;
  constexpr int64_t kStep = static_cast<int64_t>(kMaxThreads) * N;
  __shared__ A sums[kWarp];
  const int lane = threadIdx.x % kWarp;
  const bool has_dh = p.grad_residual_out.data != nullptr;
  const bool wants_dx = p.grad_input.data != nullptr || p.grad_residual.data != nullptr;
  const int64_t cols = p.shape.cols;
  const A inverse_cols = A(1) / static_cast<A>(cols);
  const auto remaining = [&](int64_t col) {
    return static_cast<int>(max(min(cols - col, int64_t{N}), int64_t{-N}));
  };
  const auto load_scale = [&](int64_t col, A(&scale)[N]) {
    const bool has_weight = p.weight.data != nullptr;
    const auto w =
        load<Aligned, W, N>(static_cast<const W*>(p.weight.data) + col, has_weight ? remaining(col) : 0);
    unpack_scale(w, has_weight, static_cast<A>(p.offset), scale);
  };

  launch_dependents();
  wait_for_predecessor();

  if (partials != nullptr) partials += blockIdx.x * cols;
  for (int64_t row = blockIdx.x; row < p.shape.rows; row += gridDim.x) {
    const BackwardRow<T, R, O> at(p, RowIndex(p.shape, row), 0);
    const A rstd = static_cast<const A*>(p.rstd)[row];
    A projection = 0;
    if (wants_dx) {
      A sum = 0;
      for (int64_t start = threadIdx.x / kWarp * kOctet * kWarp * N; start < cols; start += kOctet * kStep) {
        A products[kOctet];
#pragma unroll
        for (int chunk = 0; chunk < kOctet; ++chunk) {
          const int64_t col = start + (chunk * kWarp + lane) * N;
          A dy[N], h[N], scale[N];
          unpack(load<Aligned, O, N>(at.grad_out + col, remaining(col)), dy);
          unpack(load<Aligned, R, N>(at.residual_out + col, remaining(col)), h);
          load_scale(col, scale);
          products[chunk] = weighted_product(dy, h, scale);
        }
        sum += warp_sum(products, lane, kWarp);
      }
      __syncthreads();  // the row before has been read
      if (lane == 0) sums[threadIdx.x / kWarp] = sum;
      __syncthreads();
      projection =
          mean_projection(add_warp_sums<kOctet>(sums, {kWarp, kWarp, kWarp}, lane), rstd, inverse_cols);
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
        A dx[N] = {}, scale[N];
        if (has_dh) unpack(load<Aligned, R, N>(at.grad_residual_out + col, remaining(col)), dx);
        load_scale(col, scale);
        input_gradient(dx, dy, h, scale, rstd, projection);
        const Words<T, N> grad_input[1] = {pack<T, N>(dx)};
        const Words<R, N> grad_residual[1] = {pack<R, N>(dx)};
        if (p.grad_input.data != nullptr)
          store_run<Aligned>(at.grad_input + col, remaining(col), grad_input, lane, kWarp);
        if (p.grad_residual.data != nullptr) {
          store_run<Aligned>(at.grad_residual + col, remaining(col), grad_residual, lane, kWarp);
        }
      }
    }
  }
}

// A warp's lanes take neighbouring columns and the block's warps the partial rows, whose sums are added in a
// fixed order. The blocks are small enough to be resident beside the backward's, so that they start the
// moment those end.
template <class A, class G>
__global__ void __launch_bounds__(kWarp* kFinishWarps)
    finish_grad_weight(const A* partials, int64_t partial_rows, int64_t cols, G* grad_weight) {
  __shared__ A sums[kFinishWarps][kWarp];
  launch_dependents();
  wait_for_predecessor();
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  A sum = 0;
  if (col < cols) {
#pragma unroll 8
    for (int64_t row = threadIdx.y; row < partial_rows; row += kFinishWarps)
      sum += partials[row * cols + col];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || col >= cols) return;
  for (int warp = 1; warp < kFinishWarps; ++warp) sum += sums[warp][threadIdx.x];
  if constexpr (std::is_same_v<G, Half>) {
    grad_weight[col] = __float2half_rn(static_cast<float>(sum));
  } else if constexpr (std::is_same_v<G, BFloat16>) {
    grad_weight[col] = __float2bfloat16_rn(static_cast<float>(sum));
  } else {
    grad_weight[col] = static_cast<G>(sum);
  }
}

}  // namespace

cudaError_t launch_backward(const BackwardParams& p, const BackwardConfig& config, void* grad_weight_partials,
                            bool aligned, const Gpu& gpu, int device, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  dispatch_dtypes<Half, BFloat16>(
      p.input_dtype, p.residual_dtype, p.out_dtype, p.weight.dtype, [&](auto t, auto r, auto o, auto w) {
        using T = decltype(t);
        using R = decltype(r);
        using O = decltype(o);
        using W = decltype(w);
        using A = Accumulate<T>;
        auto* partials = static_cast<A*>(grad_weight_partials);
        const auto dispatch_alignment = [&](auto is_aligned) {
          constexpr bool kAligned = decltype(is_aligned)::value;
          Launch how;
          how.threads = dim3(config.threads, config.rows_per_block);
          how.blocks = backward_blocks(config, p.shape.rows, gpu);
          how.dependent = gpu.dependent;
          how.device = device;
          how.stream = stream;
          const SumLayout layout =
              sum_layout(div_up(p.shape.cols, kVectorElements<T>), std::max(1, config.vectors_per_thread));
          how.shared_bytes = 2 * config.rows_per_block * layout.warps * static_cast<int>(sizeof(A));
          const auto launch_as = [&](auto vectors) {
            error = launch<backward_in_registers<T, R, O, W, decltype(vectors)::value, kAligned>>(
                how, p, config, layout, partials);
          };
          if (config.kernel == BackwardKernel::kLoop) {
            how.shared_bytes = 0;
            error = launch<backward_in_a_loop<T, R, O, W, kAligned>>(how, p, partials);
            return;
          }
          switch (config.vectors_per_thread) {
            case 1:
              return launch_as(Constant<1>());
            case 2:
              return launch_as(Constant<2>());
            default:
              return launch_as(Constant<4>());
          }
        };
        aligned ? dispatch_alignment(std::true_type()) : dispatch_alignment(std::false_type());
      });
  return error;
}

cudaError_t launch_finish_grad_weight(const BackwardParams& p, const void* partials, int64_t partial_rows,
                                      const Gpu& gpu, int device, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  dispatch_dtype<Half, BFloat16>(p.grad_weight_dtype, [&](auto g) {
    using G = decltype(g);
    Launch how;
    how.blocks = div_up(p.shape.cols, kWarp);
    how.threads = dim3(kWarp, kFinishWarps);
    how.dependent = gpu.dependent;
    how.device = device;
    how.stream = stream;
    auto* grad_weight = static_cast<G*>(p.grad_weight);
    error = p.input_dtype == DType::kDouble
                ? launch<finish_grad_weight<double, G>>(how, static_cast<const double*>(partials),
                                                        partial_rows, p.shape.cols, grad_weight)
                : launch<finish_grad_weight<float, G>>(how, static_cast<const float*>(partials), partial_rows,
                                                       p.shape.cols, grad_weight);
  });
  return error;
}

}  // namespace fused::cuda
