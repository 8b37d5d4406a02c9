// Forward for every GPU, address and H. Bytes per row: input and residual read once, out and residual_out
// written once; the weight comes from the caches. (forward_shared.cu is faster for rows that do
// not start on 16 bytes, and for rows too long for the registers of a cluster.)
#include "cuda/forward.cuh"
#include "cuda/launch.cuh"

namespace fused::cuda {
namespace {

// A grid this small launches the next kernel first thing; a larger one when its loads are under way, since
// the next kernel's blocks would wait in its place.
constexpr int kBlocksThatLaunchFirst = 64;

// Resident on an SM at the least. Three where 4 vectors leave registers for it: not beside a wider
// residual or weight, and 8 vectors do not.
template <class T, class R, class W, int V>
constexpr int kBlocksPerSm = V == 4 && sizeof(R) == sizeof(T) && sizeof(W) == sizeof(T) ? 3 : 1;

// A row in the registers of `threads` threads each of `cluster` blocks: read once, written once.
template <class T, class R, class O, class W, int V, bool Aligned>
__global__ void __launch_bounds__(forward_threads(V), kBlocksPerSm<T, R, W, V>)
    forward_in_registers(const __grid_constant__ ForwardParams p,
                         const __grid_constant__ Scalars<Accumulate<T>> scalars,
                         const __grid_constant__ ForwardConfig config,
                         const __grid_constant__ SumLayout layout) {
  using A = Accumulate<T>;
  constexpr int N = kVectorElements<T>;
  FUSED_DYNAMIC_SHARED(shared);
  auto& exchanged = *reinterpret_cast<TransactionBarrier*>(shared);
  A* sums = reinterpret_cast<A*>(shared + kBlockBytes) + threadIdx.y * layout.slots;

  const int threads = config.threads, lanes = min(threads, kWarp), thread = threadIdx.x;
  const int lane = (threadIdx.y * threads + thread) % kWarp;
  const bool clustered = config.cluster > 1;
  int64_t row = static_cast<int64_t>(blockIdx.x) * config.rows_per_block + threadIdx.y;
  int warp = thread / kWarp;  // of the row
  if (clustered || threads > kWarp) clear_absent_sums(sums, layout, thread);
  if (clustered) {
    row = divide(blockIdx.x, config.cluster);
    warp += cluster_rank() * (threads / kWarp);
    if (thread == 0) {
      exchanged.init();
      TransactionBarrier::fence_init();
    }
    cluster_arrive();
  }

  const bool active = row < p.shape.rows;
  const int cols = static_cast<int>(p.shape.cols), first_col = (warp * V * kWarp + thread % kWarp) * N;
  const int remaining = (active ? cols : 0) - first_col;
  const bool has_residual = p.residual.data != nullptr, has_weight = p.weight.data != nullptr;
  ForwardRow<T, R, O> at(p, RowIndex(p.shape, row), first_col);
  const W* weight = static_cast<const W*>(p.weight.data) + first_col;
  finish_before_waiting(at.input, at.residual, at.residual_out, at.out, weight);

  const bool launch_first = gridDim.x < kBlocksThatLaunchFirst;
  if (launch_first) launch_dependents();
  wait_for_predecessor();

  Words<T, N> x[V];
  Words<R, N> r[V];
  Words<W, N> w[V];
  A h[V][N], squares[V];
  Fetched<Aligned, T, N, V> fetched_input;
  Fetched<Aligned, R, N, V> fetched_residual;
  const int remaining_residual = has_residual ? remaining : 0;
  fetch_run(at.input, remaining, fetched_input);
  fetch_run(at.residual, remaining_residual, fetched_residual);
  load_run<Aligned>(weight, has_weight ? cols - first_col : 0, w);
  if (!launch_first) launch_dependents();
  if (clustered) cluster_wait();  // every block's barrier is initialised
  align_run(fetched_input, at.input, remaining, x);
  align_run(fetched_residual, at.residual, remaining_residual, r);
  add(x, r, has_residual, p.round_sum, h);
#pragma unroll
  for (int v = 0; v < V; ++v) squares[v] = sum_of_squares(h[v]);
  if (has_residual) store_run<Aligned>(at.residual_out, remaining, r, thread % kWarp, lanes);

  A total = warp_sum(squares, lane, lanes);
  if (clustered || threads > kWarp) {
    total = exchange<V>(total, sums, warp, lane, exchanged, config.cluster, layout);
  }
  const A rstd = reciprocal_root(total, scalars);
  if (p.rstd != nullptr && active && first_col == 0) static_cast<A*>(p.rstd)[row] = rstd;
  Words<O, N> y[V];
  normalize<R>(h, rstd, p.round_normalized, w, scalars.offset, y);
  store_run<Aligned>(at.out, remaining, y, thread % kWarp, lanes);
}

// A row of any length, by one block that reads it twice: for the statistics, and for the results. A warp adds
// the octets that one lane adds in add_warp_sums.
template <class T, class R, class O, class W, bool Aligned>
__global__ void __launch_bounds__(kMaxThreads)
    forward_in_a_loop(const __grid_constant__ ForwardParams p,
                      const __grid_constant__ Scalars<Accumulate<T>> scalars) {
  using A = Accumulate<T>;
  constexpr int N = kVectorElements<T>;
  constexpr int64_t kStep = static_cast<int64_t>(kMaxThreads) * N;
  __shared__ A sums[kWarp];
  const int lane = threadIdx.x % kWarp;
  const bool has_residual = p.residual.data != nullptr, has_weight = p.weight.data != nullptr;

  launch_dependents();
  wait_for_predecessor();

  const int64_t row = blockIdx.x, cols = p.shape.cols;
  const ForwardRow<T, R, O> at(p, RowIndex(p.shape, row), 0);
  const auto remaining = [&](int64_t col) { return remaining_in_row<N>(cols, col); };
  const auto load_sum = [&](int64_t col, Words<R, N>(&rounded)[1], A(&h)[1][N]) {
    Words<T, N> x[1];
    load_run<Aligned>(at.input + col, remaining(col), x);
    load_run<Aligned>(at.residual + col, has_residual ? remaining(col) : 0, rounded);
    add(x, rounded, has_residual, p.round_sum, h);
  };

  A sum = 0;
  for (int64_t start = threadIdx.x / kWarp * kOctet * kWarp * N; start < cols; start += kOctet * kStep) {
    A squares[kOctet];
#pragma unroll
    for (int chunk = 0; chunk < kOctet; ++chunk) {
      Words<R, N> rounded[1];
      A h[1][N];
      load_sum(start + (chunk * kWarp + lane) * N, rounded, h);
      squares[chunk] = sum_of_squares(h[0]);
    }
    sum += warp_sum(squares, lane, kWarp);
  }
  if (lane == 0) sums[threadIdx.x / kWarp] = sum;
  __syncthreads();
  const A total = add_warp_sums<kOctet>(sums, {kWarp, kWarp, kWarp, kWarp}, lane);
  const A rstd = reciprocal_root(total, scalars);
  if (p.rstd != nullptr && threadIdx.x == 0) static_cast<A*>(p.rstd)[row] = rstd;

  for (int64_t start = 0; start < cols; start += kStep) {
    const int64_t col = start + threadIdx.x * N;
    Words<R, N> rounded[1];
    A h[1][N];
    load_sum(col, rounded, h);
    Words<W, N> w[1];
    load_run<Aligned>(static_cast<const W*>(p.weight.data) + col, has_weight ? remaining(col) : 0, w);
    if (has_residual) store_run<Aligned>(at.residual_out + col, remaining(col), rounded, lane, kWarp);
    Words<O, N> y[1];
    normalize<R>(h, rstd, p.round_normalized, w, scalars.offset, y);
    store_run<Aligned>(at.out + col, remaining(col), y, lane, kWarp);
  }
}

template <class T, class R, class O, class W, bool Aligned>
cudaError_t launch_as(const ForwardParams& p, const ForwardConfig& config, const Queue& queue) {
  using A = Accumulate<T>;
  const Scalars<A> scalars(p.shape, p.weight, p.offset, p.eps);
  Launch how = {forward_blocks(config, p.shape.rows), dim3(config.threads, config.rows_per_block),
                config.cluster};
  if (config.kernel == ForwardKernel::kLoop)
    return launch<forward_in_a_loop<T, R, O, W, Aligned>>(how, queue, p, scalars);

  const SumLayout layout = sum_layout(div_up(p.shape.cols, kVectorElements<T>), config.vectors_per_thread,
                                      config.threads * config.cluster);
  if (config.threads > kWarp || config.cluster > 1)
    how.shared_bytes = kBlockBytes + config.rows_per_block * layout.slots * static_cast<int>(sizeof(A));
  const auto launch_with = [&](auto vectors) {
    constexpr auto kernel = forward_in_registers<T, R, O, W, decltype(vectors)::value, Aligned>;
    return launch<kernel>(how, queue, p, scalars, config, layout);
  };
  if constexpr (Aligned) {
    if constexpr (sizeof(T) >= 4) {
      if (config.vectors_per_thread == 8) return launch_with(Constant<8>());
    }
    if (config.vectors_per_thread == 4) return launch_with(Constant<4>());
    if (config.vectors_per_thread == 2) return launch_with(Constant<2>());
  }
  return config.vectors_per_thread == 1 ? launch_with(Constant<1>()) : cudaErrorInvalidConfiguration;
}

}  // namespace

cudaError_t launch_forward(const ForwardParams& p, const ForwardConfig& config, bool aligned,
                           const Queue& queue) {
  return dispatch(p, aligned, [&](auto t, auto r, auto o, auto w, auto is_aligned) {
    return launch_as<decltype(t), decltype(r), decltype(o), decltype(w), is_aligned>(p, config, queue);
  });
}

cudaError_t kernel_target(int* target) {
  cudaFuncAttributes attributes;
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, forward_in_a_loop<float, float, float, float, true>);
  if (error == cudaSuccess) *target = attributes.ptxVersion;
  return error;
}

}  // namespace fused::cuda
