// Backward for every GPU, address and H. Bytes per row: grad_out, residual_out and grad_residual_out read,
// the gradients written; a few persistent blocks an SM, so that grad_weight's partial sums stay in registers.
// (backward_ring.cu is faster where it can run and there are rows enough.)
#include "cuda/assembly.cuh"
#include "cuda/backward.cuh"
#include "cuda/launch.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/vectors.cuh"

namespace fused::cuda {
namespace {

constexpr int kFinishWarps = 16, kFinishRows = 12;  // of a block; that a warp has under way at once

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

// grad_weight of 32 vectors' columns over all the rows, of which each warp takes some.
template <class T, class R, class O, bool Aligned>
__device__ __forceinline__ void add_rows(const BackwardParams& p, int first_col, unsigned char* shared) {
  using A = Accumulate<T>;
  constexpr int N = kVectorElements<T>, kCols = kWarp * N;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, lane = thread % kWarp, warp = thread / kWarp,
            warps = blockDim.x * blockDim.y / kWarp;
  const int cols = min(kCols, static_cast<int>(p.shape.cols) - first_col), remaining = cols - lane * N;
  A grad_weight[1][N] = {};
#pragma unroll 4
  for (int64_t row = warp; row < p.shape.rows; row += warps) {
    const BackwardRow<T, R, O> at(p, RowIndex(p.shape, row), first_col + lane * N);
    A dy[N], h[N];
    unpack(load<Aligned, O, N>(at.grad_out, remaining), dy);
    unpack(load<Aligned, R, N>(at.residual_out, remaining), h);
    add_weight_gradient(grad_weight[0], dy, h, static_cast<const A*>(p.rstd)[row]);
  }
  add_teams<Aligned>(p, static_cast<A*>(nullptr), first_col, cols, grad_weight, shared, warp, warps, kCols,
                     lane * N);
}

// A row in the registers of a block's `threads` threads. Where rows are few, blocks of their own form
// grad_weight, which spares the partial sums and the kernel that adds them up.
template <class T, class R, class O, class W, int V, bool Aligned>
__global__ void __launch_bounds__(backward_threads(V))
    backward_in_registers(const __grid_constant__ BackwardParams p,
                          const __grid_constant__ Scalars<Accumulate<T>> scalars,
                          const __grid_constant__ BackwardConfig config,
                          const __grid_constant__ SumLayout layout, int column_blocks,
                          Accumulate<T>* partials) {
  using A = Accumulate<T>;
  constexpr int N = kVectorElements<T>;
  FUSED_DYNAMIC_SHARED(shared);

  const int threads = config.threads, lanes = min(threads, kWarp), thread = threadIdx.x,
            warp = thread / kWarp;
  const int lane = (threadIdx.y * threads + thread) % kWarp;
  const int cols = static_cast<int>(p.shape.cols), first_col = (warp * V * kWarp + thread % kWarp) * N;
  const bool has_dh = p.grad_residual_out.data != nullptr;
  const bool wants_dx = p.grad_input.data != nullptr || p.grad_residual.data != nullptr;
  const bool has_weight = p.weight.data != nullptr;
  const bool wants_weight = p.grad_weight != nullptr && !config.columns_apart;
  const W* weight = static_cast<const W*>(p.weight.data) + first_col;

  // Two rows' sums: a warp may write the next row's while another still reads this row's.
  A* both_sums = reinterpret_cast<A*>(shared) + threadIdx.y * 2 * layout.slots;
  if (threads > kWarp) {
    clear_absent_sums(both_sums, layout, thread);
    clear_absent_sums(both_sums + layout.slots, layout, thread);
  }

  const int block = static_cast<int>(blockIdx.x) - column_blocks;  // of those with rows
  const int64_t step = (static_cast<int64_t>(gridDim.x) - column_blocks) * config.rows_per_block;
  int64_t row = static_cast<int64_t>(block) * config.rows_per_block + threadIdx.y;
  BackwardRow<T, R, O> at(p, RowIndex(p.shape, row), first_col);
  finish_before_waiting(at.grad_out, at.residual_out, at.grad_residual_out, at.grad_input, at.grad_residual,
                        weight);

  launch_dependents();
  wait_for_predecessor();
  if (block < 0) {  // they have the longer loop, and come first
    add_rows<T, R, O, Aligned>(p, blockIdx.x * kWarp * N, shared);
    return;
  }

  Words<W, N> w[V];
  load_run<Aligned>(weight, has_weight ? cols - first_col : 0, w);
  A grad_weight[V][N] = {};
  int parity = 0;
  for (; row - threadIdx.y < p.shape.rows; row += step) {  // as often for all of a block's rows
    const bool active = row < p.shape.rows;
    const int remaining = (active ? cols : 0) - first_col;
    if (row >= step) at = BackwardRow<T, R, O>(p, RowIndex(p.shape, row), first_col);
    const A rstd = active ? static_cast<const A*>(p.rstd)[row] : A(0);

    Fetched<Aligned, O, N, V> fetched_dy;
    Fetched<Aligned, R, N, V> fetched_h, fetched_dh;
    Words<O, N> dy[V];
    Words<R, N> h[V], dh[V];
    const int remaining_dh = has_dh && wants_dx ? remaining : 0;
    fetch_run(at.grad_out, remaining, fetched_dy);
    fetch_run(at.residual_out, remaining, fetched_h);
    fetch_run(at.grad_residual_out, remaining_dh, fetched_dh);
    align_run(fetched_dy, at.grad_out, remaining, dy);
    align_run(fetched_h, at.residual_out, remaining, h);
    align_run(fetched_dh, at.grad_residual_out, remaining_dh, dh);

    A products[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      A dy_values[N], h_values[N], scale[N];
      unpack(dy[v], dy_values);
      unpack(h[v], h_values);
      unpack_scale(w[v], scalars.offset, scale);
      if (wants_weight) add_weight_gradient(grad_weight[v], dy_values, h_values, rstd);
      products[v] = weighted_product(dy_values, h_values, scale);
    }
    if (!wants_dx) continue;

    A total = warp_sum(products, lane, lanes);
    if (threads > kWarp) {
      A* sums = both_sums + parity * layout.slots;
      if (lane == 0) sums[warp] = total;
      __syncthreads();
      total = add_warp_sums<V>(sums, layout, lane);
      parity ^= 1;
    }
    const A projection = mean_projection(total, rstd, scalars.inverse_cols);

    Words<T, N> grad_input[V];
    Words<R, N> grad_residual[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      A dx[N], dy_values[N], h_values[N], scale[N];
      unpack(dh[v], dx);
      unpack(dy[v], dy_values);
      unpack(h[v], h_values);
      unpack_scale(w[v], scalars.offset, scale);
      input_gradient(dx, dy_values, h_values, scale, rstd, projection);
      grad_input[v] = pack<T, N>(dx);
      grad_residual[v] = pack<R, N>(dx);
    }
    const int lane_of_row = thread % kWarp;
    if (p.grad_input.data != nullptr)
      store_run<Aligned>(at.grad_input, remaining, grad_input, lane_of_row, lanes);
    if (p.grad_residual.data != nullptr)
      store_run<Aligned>(at.grad_residual, remaining, grad_residual, lane_of_row, lanes);
  }

  if (!wants_weight) return;
  if (partials != nullptr) partials += static_cast<int64_t>(blockIdx.x) * cols;
  add_teams<Aligned>(p, partials, 0, cols, grad_weight, shared, threadIdx.y, blockDim.y, threads * V * N,
                     first_col);
}

// A row of any length, read twice; the partial sums of grad_weight are in global memory, each element owned
// by one thread.
template <class T, class R, class O, class W, bool Aligned>
__global__ void __launch_bounds__(kMaxThreads)
    backward_in_a_loop(const __grid_constant__ BackwardParams p,
                       const __grid_constant__ Scalars<Accumulate<T>> scalars, Accumulate<T>* partials) {
  using A = Accumulate<T>;
  constexpr int N = kVectorElements<T>;
  constexpr int64_t kStep = static_cast<int64_t>(kMaxThreads) * N;
  __shared__ A sums[kWarp];
  const int lane = threadIdx.x % kWarp;
  const bool has_dh = p.grad_residual_out.data != nullptr;
  const bool wants_dx = p.grad_input.data != nullptr || p.grad_residual.data != nullptr;
  const int64_t cols = p.shape.cols;
  const auto remaining = [&](int64_t col) { return remaining_in_row<N>(cols, col); };
  const auto load_scale = [&](int64_t col, A(&scale)[N]) {
    const bool has_weight = p.weight.data != nullptr;
    const auto w =
        load<Aligned, W, N>(static_cast<const W*>(p.weight.data) + col, has_weight ? remaining(col) : 0);
    unpack_scale(w, scalars.offset, scale);
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
      projection = mean_projection(add_warp_sums<kOctet>(sums, {kWarp, kWarp, kWarp, kWarp}, lane), rstd,
                                   scalars.inverse_cols);
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

// A warp's lanes take neighbouring columns; `warps` (a power of two) of a block's warps share the partial
// rows of a group of columns, and their sums are added in a fixed order.
template <class A>
__global__ void __launch_bounds__(kWarp* kFinishWarps)
    finish_grad_weight(const __grid_constant__ BackwardParams p, const A* partials, int partial_rows,
                       int warps) {
  __shared__ A sums[kFinishWarps][kWarp];
  const int64_t cols = p.shape.cols, step = warps * cols;
  const int group = divide(threadIdx.y, warps), warp = threadIdx.y & (warps - 1);
  const int64_t col =
      (static_cast<int64_t>(blockIdx.x) * divide(kFinishWarps, warps) + group) * kWarp + threadIdx.x;
  const A* from = partials + warp * cols + col;
  finish_before_waiting(from);
  launch_dependents();
  wait_for_predecessor();

  A sum = 0;
  for (int row = warp; col < cols && row < partial_rows; row += kFinishRows * warps) {
    A parts[kFinishRows];
#pragma unroll
    for (int i = 0; i < kFinishRows; ++i, from += step)
      parts[i] = row + i * warps < partial_rows ? *from : A(0);
#pragma unroll
    for (int i = 0; i < kFinishRows; ++i) sum += parts[i];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (warp > 0 || col >= cols) return;
#pragma unroll
  for (int other = 1; other < kFinishWarps; ++other)
    if (other < warps) sum += sums[threadIdx.y + other][threadIdx.x];
  with_grad_weight(p, [&](auto* to) { store_rounded(to + col, sum); });
}

template <class T, class R, class O, class W, bool Aligned>
cudaError_t launch_as(const BackwardParams& p, const BackwardConfig& config, void* grad_weight_partials,
                      const Queue& queue) {
  using A = Accumulate<T>;
  const Scalars<A> scalars(p.shape, p.weight, p.offset);
  auto* partials = static_cast<A*>(grad_weight_partials);
  const int v = config.vectors_per_thread;
  Launch how = {backward_blocks(config, p.shape.rows, queue.gpu),
                dim3(config.threads, config.rows_per_block)};
  if (config.kernel == BackwardKernel::kLoop)
    return launch<backward_in_a_loop<T, R, O, W, Aligned>>(how, queue, p, scalars, partials);

  constexpr int N = kVectorElements<T>;
  const SumLayout layout = sum_layout(div_up(p.shape.cols, N), v, config.threads);
  const bool wants_dx = p.grad_input.data != nullptr || p.grad_residual.data != nullptr;
  int column_blocks = 0;
  how.shared_bytes = 2 * config.rows_per_block * layout.slots * static_cast<int>(sizeof(A));
  if (p.grad_weight != nullptr) {
    int teams = config.rows_per_block, slice = config.threads * v * N;
    if (config.columns_apart) {
      column_blocks = static_cast<int>(div_up(p.shape.cols, kWarp * N));
      how.blocks = (wants_dx ? how.blocks : 0) + column_blocks;
      teams = config.threads * config.rows_per_block / kWarp;
      slice = kWarp * N;
    }
    how.shared_bytes = std::max(how.shared_bytes, teams * slice * static_cast<int>(sizeof(A)));
  }
  const auto launch_with = [&](auto vectors) {
    constexpr auto kernel = backward_in_registers<T, R, O, W, decltype(vectors)::value, Aligned>;
    return launch<kernel>(how, queue, p, scalars, config, layout, column_blocks, partials);
  };
  if (v == 1) return launch_with(Constant<1>());
  if (v == 2) return launch_with(Constant<2>());
  return launch_with(Constant<4>());
}

}  // namespace

cudaError_t launch_backward(const BackwardParams& p, const BackwardConfig& config, void* grad_weight_partials,
                            bool aligned, const Queue& queue) {
  return dispatch(p, aligned, [&](auto t, auto r, auto o, auto w, auto is_aligned) {
    return launch_as<decltype(t), decltype(r), decltype(o), decltype(w), is_aligned>(
        p, config, grad_weight_partials, queue);
  });
}

cudaError_t launch_finish_grad_weight(const BackwardParams& p, const void* partials, int64_t partial_rows,
                                      const Queue& queue) {
  // About 8 partial rows a warp.
  const int rows = static_cast<int>(partial_rows);
  const int warps = std::min(kFinishWarps, next_power_of_two(div_up(rows, 8)));
  const Launch how = {div_up(p.shape.cols, kWarp * (kFinishWarps / warps)), dim3(kWarp, kFinishWarps)};
  const auto add_up = [&](auto zero) {
    using A = decltype(zero);
    return launch<finish_grad_weight<A>>(how, queue, p, static_cast<const A*>(partials), rows, warps);
  };
  return p.input_dtype == DType::kDouble ? add_up(0.0) : add_up(0.0f);
}

}  // namespace fused::cuda
