// Forward by way of shared memory, into which a row, or a cluster's part of it (its slice), is copied first:
// few registers for many bytes on their way, and any thread can reach any element. Unaligned, the results are
// worked out in vectors that start on 16 bytes of out, and are stored whole except at the slice's ends.
#include "cuda/forward.cuh"
#include "cuda/launch.cuh"

namespace fused::cuda {
namespace {

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

// Registers a thread, at most, for bytes enough on their way: an SM holds three blocks of 512 threads or,
// unaligned, seven of 160. (sm_75 holds 1024 threads in all.)
template <bool Aligned>
constexpr int kSharedRegisters = !Aligned       ? 56
                                 : FUSED_HOPPER ? 40
                                                : 64;

template <class T, class R, class O, class W, bool Aligned>
__global__ void __maxnreg__(kSharedRegisters<Aligned>)
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
  const ForwardRow<T, R, O> at(p, RowIndex(p.shape, row), slice_col);
  const W* weight = static_cast<const W*>(p.weight.data) + slice_col;
  // In shared memory, as far from a line's start as in global memory, which copies fastest.
  const auto place = [&](int offset, const void* from) { return shared + offset + within_line(from); };
  T* x = reinterpret_cast<T*>(place(slice_layout.input, at.input));
  R* r = reinterpret_cast<R*>(place(slice_layout.residual, at.residual));

  clear_absent_sums(sums, layout, thread);
  if (lane == 0) {
    filled->init();
    if (thread == 0) exchanged.init();
    TransactionBarrier::fence_init();
  }
  if (clustered) cluster_arrive();
  wait_for_predecessor();
  const bool last = run_cols == cols - run_col;
  copy_run(x + run_col, at.input + run_col, run_cols, last, lane, *filled);
  if (has_residual) copy_run(r + run_col, at.residual + run_col, run_cols, last, lane, *filled);
  if (lane == 0) filled->arrive_expecting(0);
  launch_dependents();
  if (clustered) cluster_wait();  // every block's barriers are initialised
  Aligned ? __syncwarp() : __syncthreads();
  filled->wait(0);
  if (!Aligned && thread / kWarp + 1 < threads / kWarp) filled[1].wait(0);  // has the end of this warp's run

  // residual_out is stored now where this thread's vectors of it start on 16 bytes, else with those of out.
  const bool store_sum_first = Aligned || misalignment(at.residual_out) == 0;
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
    if (store_sum_first && has_residual) {
      store_part<true>(at.residual_out + col, 0, Aligned ? N : left, r_run[0]);
    }
  }
  const int warp = (rank * threads + thread) / kWarp;  // of the row
  const A total =
      exchange<V>(warp_sum(squares, lane, kWarp), sums, warp, lane, exchanged, config.cluster, layout);
  const A rstd = reciprocal_root(total, scalars);
  if (p.rstd != nullptr && thread == 0 && rank == 0) static_cast<A*>(p.rstd)[row] = rstd;

  // The vectors of out that start on 16 bytes start where a thread's own do, or `ahead` elements before.
  const int ahead = Aligned ? 0 : misalignment(at.out) / static_cast<int>(sizeof(O));
  const bool x_level = misalignment(x - ahead) == 0, r_level = !has_residual || misalignment(r - ahead) == 0;
  const auto load_whole = [](const auto* from, bool level) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(from)>>;
    return Aligned || level ? load_part<true, E, N>(from, 0, N) : load_part<false, E, N>(from, 0, N);
  };
  // The results of the vector at col, of which elements [begin, end) are the slice's.
  const auto finish = [&](int col, int begin, int end) {
    Words<T, N> x_run[1];
    Words<R, N> r_run[1];
    if (x_level && r_level) {  // as a rule, by one branch
      x_run[0] = load_whole(x + col, true);
      if (has_residual) r_run[0] = load_whole(r + col, true);
    } else {
      x_run[0] = load_whole(x + col, x_level);
      if (has_residual) r_run[0] = load_whole(r + col, r_level);
    }
    Words<W, N> w[1] = {};
    if (has_weight) w[0] = load_part<Aligned, W, N>(weight + col, begin, end);
    A h[1][N];
    Words<O, N> y[1];
    add(x_run, r_run, has_residual, p.round_sum, h);
    if (!store_sum_first && has_residual) store_part<false>(at.residual_out + col, begin, end, r_run[0]);
    normalize<R>(h, rstd, p.round_normalized, w, scalars.offset, y);
    store_part<Aligned>(at.out + col, begin, end, y[0]);
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

template <class T, class R, class O, class W, bool Aligned>
cudaError_t launch_as(const ForwardParams& p, const ForwardConfig& config, const Queue& queue) {
  using A = Accumulate<T>;
  constexpr int N = kVectorElements<T>;
  const int64_t vectors = div_up(p.shape.cols, N);
  const SliceLayout slice = slice_layout(config, vectors, sizeof(A), N * sizeof(T), N * sizeof(R));
  const Launch how = {forward_blocks(config, p.shape.rows), dim3(config.threads), config.cluster,
                      slice.bytes};
  return launch<forward_through_shared<T, R, O, W, Aligned>>(
      how, queue, p, Scalars<A>(p.shape, p.weight, p.offset, p.eps), config,
      sum_layout(vectors, config.vectors_per_thread, config.threads * config.cluster), slice);
}

}  // namespace

cudaError_t launch_forward_shared(const ForwardParams& p, const ForwardConfig& config, bool aligned,
                                  const Queue& queue) {
  return dispatch(p, aligned, [&](auto t, auto r, auto o, auto w, auto is_aligned) {
    return launch_as<decltype(t), decltype(r), decltype(o), decltype(w), is_aligned>(p, config, queue);
  });
}

}  // namespace fused::cuda
