// Forward. Bytes per row: input and residual read once, out and residual_out written once; the weight comes
// from the caches.
#include "cuda/assembly.cuh"
#include "cuda/launch.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/vectors.cuh"

namespace fused::cuda {
namespace {

// A grid this small launches the next kernel first thing; a larger one when its loads are under way, since
// the next kernel's blocks would wait in its place.
constexpr int kBlocksThatLaunchFirst = 64;

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

// A row in the registers of `threads` threads each of `cluster` blocks: read once, written once.
template <class T, class R, class O, class W, int V, bool Aligned>
__global__ void __launch_bounds__(kMaxThreads)
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
  const int remaining = active ? cols - first_col : -N;
  const bool has_residual = p.residual.data != nullptr, has_weight = p.weight.data != nullptr;
  const RowIndex index(p.shape, row);
  const T* input = row_of<const T>(p.input, index) + first_col;
  const R* residual = row_of<const R>(p.residual, index) + first_col;
  R* residual_out = row_of<R>(p.residual_out, index) + first_col;
  O* out = row_of<O>(p.out, index) + first_col;
  const W* weight = static_cast<const W*>(p.weight.data) + first_col;
  finish_before_waiting(input, residual, residual_out, out, weight);

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
  fetch_run(input, remaining, fetched_input);
  fetch_run(residual, remaining_residual, fetched_residual);
  load_run<Aligned>(weight, has_weight ? cols - first_col : 0, w);
  if (!launch_first) launch_dependents();
  if (clustered) cluster_wait();  // every block's barrier is initialised
  align_run(fetched_input, input, remaining, x);
  align_run(fetched_residual, residual, remaining_residual, r);
  add(x, r, has_residual, p.round_sum, h);
#pragma unroll
  for (int v = 0; v < V; ++v) squares[v] = sum_of_squares(h[v]);
  if (has_residual) store_run<Aligned>(residual_out, remaining, r, thread % kWarp, lanes);

  A total = warp_sum(squares, lane, lanes);
  if (clustered || threads > kWarp) {
    total = exchange<V>(total, sums, warp, lane, exchanged, config.cluster, layout);
  }
  const A rstd = reciprocal_root(total, scalars);
  if (p.rstd != nullptr && active && first_col == 0) static_cast<A*>(p.rstd)[row] = rstd;
  Words<O, N> y[V];
  normalize<R>(h, rstd, p.round_normalized, w, scalars.offset, y);
  store_run<Aligned>(out, remaining, y, thread % kWarp, lanes);
}

// Copies a warp's run of `count` elements into shared memory, by the 16-byte blocks from the one with its
// first element on, to a place as far from 16 bytes. The block that the next run begins in is left to that
// run.
template <class T>
__device__ __forceinline__ void copy_run(T* to, const T* from, int count, bool last, int lane,
                                         TransactionBarrier& filled) {
  const int shift = misalignment(from), end = shift + count * static_cast<int>(sizeof(T));
  const int bytes = (last ? end + kBlockBytes - 1 : end) / kBlockBytes * kBlockBytes;
  char* first = reinterpret_cast<char*>(to) - shift;
  const char* source = reinterpret_cast<const char*>(from) - shift;
  if (count <= 0) return;
#if FUSED_HOPPER
  if (lane > 0) return;
  filled.expect(bytes);
  bulk_copy(first, source, bytes, filled);
#else
  for (int at = lane * kBlockBytes; at < bytes; at += kWarp * kBlockBytes) {
    uint32_t word[kBlockWords];
    load_block(source + at, word);
    store_block(first + at, word);
  }
#endif
}

// Resident on an SM at the least: bytes enough on their way. (sm_75 holds 1024 threads.)
template <bool Aligned>
constexpr int kSharedBlocks = !Aligned || !FUSED_HOPPER ? 2 : 3;

// A row, or a cluster's part of it (its slice), by way of shared memory, into which it is copied first: few
// registers for many bytes on their way, and any thread can reach any element. Unaligned, the results are
// worked out in vectors that start on 16 bytes of out, and are stored whole except at the slice's ends.
template <class T, class R, class O, class W, bool Aligned>
__global__ void __launch_bounds__(kSharedThreads, kSharedBlocks<Aligned>)
    forward_through_shared(const __grid_constant__ ForwardParams p,
                           const __grid_constant__ Scalars<Accumulate<T>> scalars,
                           const __grid_constant__ ForwardConfig config,
                           const __grid_constant__ SumLayout layout,
                           const __grid_constant__ SliceLayout slice_layout) {
  using A = Accumulate<T>;
  constexpr int N = kVectorElements<T>, V = kSharedVectors, kRun = V * kWarp * N;
  FUSED_DYNAMIC_SHARED(shared);
  const int threads = config.threads, thread = threadIdx.x, lane = thread % kWarp;
  auto* barriers = reinterpret_cast<TransactionBarrier*>(shared);
  TransactionBarrier &exchanged = barriers[0], *filled = barriers + 1 + thread / kWarp;
  A* sums = reinterpret_cast<A*>(shared + SliceLayout::kSums);

  const bool clustered = config.cluster > 1;
  const int rank = clustered ? cluster_rank() : 0;
  const int64_t row = divide(blockIdx.x, config.cluster);
  const int slice = threads * V * N, slice_col = rank * slice;
  const int cols = min(slice, static_cast<int>(p.shape.cols) - slice_col);  // of the slice
  const int run_col = thread / kWarp * kRun, run_cols = min(kRun, cols - run_col);
  const bool has_residual = p.residual.data != nullptr, has_weight = p.weight.data != nullptr;
  const RowIndex index(p.shape, row);
  const T* input = row_of<const T>(p.input, index) + slice_col;
  const R* residual = row_of<const R>(p.residual, index) + slice_col;
  R* residual_out = row_of<R>(p.residual_out, index) + slice_col;
  O* out = row_of<O>(p.out, index) + slice_col;
  const W* weight = static_cast<const W*>(p.weight.data) + slice_col;
  // In shared memory, as far from a line's start as in global memory, which copies fastest.
  const auto place = [&](int offset, const void* from) { return shared + offset + within_line(from); };
  T* x = reinterpret_cast<T*>(place(slice_layout.input, input));
  R* r = reinterpret_cast<R*>(place(slice_layout.residual, residual));

  clear_absent_sums(sums, layout, thread);
  if (lane == 0) {
    filled->init();
    if (thread == 0) exchanged.init();
    TransactionBarrier::fence_init();
  }
  if (clustered) cluster_arrive();
  wait_for_predecessor();
  const bool last = run_cols == cols - run_col;
  copy_run(x + run_col, input + run_col, run_cols, last, lane, *filled);
  if (has_residual) copy_run(r + run_col, residual + run_col, run_cols, last, lane, *filled);
  if (lane == 0) filled->arrive_expecting(0);
  launch_dependents();
  if (clustered) cluster_wait();  // every block's barriers are initialised
  Aligned ? __syncwarp() : __syncthreads();
  filled->wait(0);
  if (!Aligned && thread / kWarp + 1 < threads / kWarp) filled[1].wait(0);  // has the end of this warp's run

  A squares[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int col = run_col + (v * kWarp + lane) * N, left = cols - col;
    squares[v] = 0;
    if (left <= 0) continue;
    const Words<T, N> x_run[1] = {load_part<Aligned, T, N>(x + col, 0, N)};
    Words<R, N> r_run[1];
    if (has_residual) r_run[0] = load_part<Aligned, R, N>(r + col, 0, N);
    A h[1][N];
    add(x_run, r_run, has_residual, p.round_sum, h);
    if (!Aligned && left < N) {
#pragma unroll
      for (int i = 0; i < N; ++i) h[0][i] = i < left ? h[0][i] : A(0);
    }
    squares[v] = sum_of_squares(h[0]);
    if (Aligned && has_residual) store_part<true>(residual_out + col, 0, N, r_run[0]);
  }
  const int warp = (rank * threads + thread) / kWarp;  // of the row
  const A total =
      exchange<V>(warp_sum(squares, lane, kWarp), sums, warp, lane, exchanged, config.cluster, layout);
  const A rstd = reciprocal_root(total, scalars);
  if (p.rstd != nullptr && thread == 0 && rank == 0) static_cast<A*>(p.rstd)[row] = rstd;

  // The vectors of out that start on 16 bytes start where a thread's own do, or `ahead` elements before.
  const int ahead = Aligned ? 0 : misalignment(out) / static_cast<int>(sizeof(O));
  const bool level =
      Aligned || (misalignment(x - ahead) == 0 && (!has_residual || misalignment(r - ahead) == 0));
  // The results of the vector at col, of which elements [begin, end) are the slice's.
  const auto finish = [&](int col, int begin, int end) {
    Words<T, N> x_run[1];
    Words<R, N> r_run[1];
    if (level) {
      x_run[0] = load_part<true, T, N>(x + col, 0, N);
      if (has_residual) r_run[0] = load_part<true, R, N>(r + col, 0, N);
    } else {
      x_run[0] = load_part<false, T, N>(x + col, 0, N);
      if (has_residual) r_run[0] = load_part<false, R, N>(r + col, 0, N);
    }
    Words<W, N> w[1] = {};
    if (has_weight) w[0] = load_part<Aligned, W, N>(weight + col, begin, end);
    A h[1][N];
    Words<O, N> y[1];
    add(x_run, r_run, has_residual, p.round_sum, h);
    if (!Aligned && has_residual) store_part<false>(residual_out + col, begin, end, r_run[0]);
    normalize<R>(h, rstd, p.round_normalized, w, scalars.offset, y);
    store_part<Aligned>(out + col, begin, end, y[0]);
  };
  if constexpr (Aligned) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int col = run_col + (v * kWarp + lane) * N;
      if (col < cols) finish(col, 0, N);
    }
  } else {  // by vectors of out: a thread reads what others loaded
    for (int col = thread * N - ahead; col < cols; col += threads * N) finish(col, -col, cols - col);
  }
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
  const RowIndex index(p.shape, row);
  const T* input = row_of<const T>(p.input, index);
  const R* residual = row_of<const R>(p.residual, index);
  R* residual_out = row_of<R>(p.residual_out, index);
  O* out = row_of<O>(p.out, index);
  const auto remaining = [&](int64_t col) {
    return static_cast<int>(max(min(cols - col, int64_t{N}), int64_t{-N}));
  };
  const auto load_sum = [&](int64_t col, Words<R, N>(&rounded)[1], A(&h)[1][N]) {
    Words<T, N> x[1];
    load_run<Aligned>(input + col, remaining(col), x);
    load_run<Aligned>(residual + col, has_residual ? remaining(col) : 0, rounded);
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
    if (has_residual) store_run<Aligned>(residual_out + col, remaining(col), rounded, lane, kWarp);
    Words<O, N> y[1];
    normalize<R>(h, rstd, p.round_normalized, w, scalars.offset, y);
    store_run<Aligned>(out + col, remaining(col), y, lane, kWarp);
  }
}

template <class T, class R, class O, class W, bool Aligned>
cudaError_t launch_as(const ForwardParams& p, const ForwardConfig& config, const Queue& queue) {
  using A = Accumulate<T>;
  constexpr int N = kVectorElements<T>;
  const Scalars<A> scalars(p.shape, p.weight, p.offset, p.eps);
  Launch how = {forward_blocks(config, p.shape.rows), dim3(config.threads, config.rows_per_block),
                config.cluster};
  if (config.kernel == ForwardKernel::kLoop)
    return launch<forward_in_a_loop<T, R, O, W, Aligned>>(how, queue, p, scalars);

  const int64_t vectors = div_up(p.shape.cols, N);
  const SumLayout layout = sum_layout(vectors, config.vectors_per_thread, config.threads * config.cluster);
  if (config.kernel == ForwardKernel::kShared) {
    const SliceLayout slice = slice_layout(config, vectors, sizeof(A), N * sizeof(T), N * sizeof(R));
    how.shared_bytes = slice.bytes;
    return launch<forward_through_shared<T, R, O, W, Aligned>>(how, queue, p, scalars, config, layout, slice);
  }
  if (config.threads > kWarp || config.cluster > 1)
    how.shared_bytes = kBlockBytes + config.rows_per_block * layout.slots * static_cast<int>(sizeof(A));
  if constexpr (Aligned) {
    if (config.vectors_per_thread == 2)
      return launch<forward_in_registers<T, R, O, W, 2, Aligned>>(how, queue, p, scalars, config, layout);
  }
  return launch<forward_in_registers<T, R, O, W, 1, Aligned>>(how, queue, p, scalars, config, layout);
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
