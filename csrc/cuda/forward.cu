// Forward. Bytes per row: input and residual read once, out and residual_out written once; the weight comes from the L1 cache.
#include "cuda/forward.h"

#include "cuda/hopper.cuh"
#include "cuda/launch.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/vectors.cuh"
#include "dispatch.h"

namespace fused::cuda {
namespace {

template <class R, int N, class A>
__device__ __forceinline__ void round_to(A (&values)[N]) {
  unpack(pack<R, N>(values), values);
}

template <int N, class A>
__device__ __forceinline__ A sum_of_squares(const A (&values)[N]) {
  A sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) sum = fma(values[i], values[i], sum);
  return sum;
}

template <class A>
__device__ __forceinline__ A reciprocal_root(A sum_of_squares, int64_t cols, double eps) {
  return A(1) / sqrt(sum_of_squares / static_cast<A>(cols) + static_cast<A>(eps));
}

// out of one vector of h.
template <class R, class O, int N, class A>
__device__ __forceinline__ Words<O, N> normalize(const A (&h)[N], A rstd, bool round_normalized, const A (&scale)[N]) {
  A values[N];
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = h[i] * rstd;
  if (round_normalized) round_to<R>(values);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] *= scale[i];
  return pack<O, N>(values);
}

// A row in the registers of `threads` threads of `cluster` blocks: read once, written once.
template <class T, class R, class O, int V, int MaxThreads, bool Aligned>
__global__ void __launch_bounds__(MaxThreads)
    forward_in_registers(const __grid_constant__ ForwardParams p, const __grid_constant__ ForwardConfig config, int chunks) {
  using A = Accumulate<T>;
  constexpr int N = kVectorElements<T>;
  constexpr bool kScaleEarly = V <= 2;  // few vectors: the registers are there, and latency counts
  extern __shared__ __align__(16) unsigned char shared[];
  auto& barrier = *reinterpret_cast<TransactionBarrier*>(shared);
  A* sums = reinterpret_cast<A*>(shared + kBlockBytes) + threadIdx.y * chunks;

  const int threads = config.threads, warps = threads / kWarp, lanes = min(threads, kWarp);
  const int thread = threadIdx.x, lane = (threadIdx.y * threads + thread) % kWarp;
  const int lane_of_row = thread % kWarp;
  const bool first = lane_of_row == 0, last = lane_of_row == lanes - 1;
  const int rank = config.cluster > 1 ? cluster_rank() : 0;
  if (config.cluster > 1) {
    if (thread == 0) {
      barrier.init();
      TransactionBarrier::fence_init();
    }
    cluster_arrive();
  }

  const int64_t row = static_cast<int64_t>(blockIdx.x / config.cluster) * config.rows_per_block + threadIdx.y;
  const bool active = row < p.shape.rows;
  const int cols = static_cast<int>(p.shape.cols), stride = threads * N;
  const int first_col = (rank * V * threads + thread) * N;
  const auto remaining = [&](int v) { return active ? cols - first_col - v * stride : -N; };
  const bool has_residual = p.residual.data != nullptr;

  launch_dependents();
  wait_for_predecessor();

  const T* input = row_of<const T>(p.input, p.shape, row) + first_col;
  const R* residual = row_of<const R>(p.residual, p.shape, row) + first_col;
  Words<T, N> x[V];
  Words<R, N> r[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    x[v] = load<Aligned, T, N>(input + v * stride, remaining(v));
    r[v] = {};
    if (has_residual) r[v] = load<Aligned, R, N>(residual + v * stride, remaining(v));
  }
  const Scale<A> scale{p.weight, static_cast<A>(p.offset)};
  A early_scale[kScaleEarly ? V : 1][N];
  if constexpr (kScaleEarly) load_scale(scale, first_col, stride, cols, early_scale);

  R* residual_out = row_of<R>(p.residual_out, p.shape, row) + first_col;
  A h[V][N], squares[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    unpack(x[v], h[v]);
    if (has_residual) {
      A addend[N];
      unpack(r[v], addend);
#pragma unroll
      for (int i = 0; i < N; ++i) h[v][i] += addend[i];
      const Words<R, N> rounded = pack<R, N>(h[v]);
      store<Aligned>(residual_out + v * stride, remaining(v), rounded, first, last);
      if (p.round_sum) unpack(rounded, h[v]);
    }
    squares[v] = sum_of_squares(h[v]);
  }

  A total = chunk_sums(squares, lane, lanes);
  if (warps <= 1 && config.cluster == 1) {
    total = add_chunks_in_warp<V>(total);
  } else {
    constexpr int kReplicas = kWarp / V;  // lanes that hold the same chunk's sum
    const int chunk = (rank * V + chunk_of_lane<V>(lane)) * warps + thread / kWarp, replica = lane % kReplicas;
    if (config.cluster == 1) {
      if (replica == 0 && chunk < chunks) sums[chunk] = total;
      __syncthreads();
    } else {
      cluster_wait();  // every block's barrier is initialised
      if (thread == 0) barrier.arrive_expecting(chunks * sizeof(A));
      if (chunk < chunks) {
        for (int peer = replica; peer < config.cluster; peer += kReplicas) store_in_peer(sums + chunk, total, barrier, peer);
      }
      barrier.wait(0);
    }
    total = add_chunks(sums, chunks, lane);
  }

  const A rstd = reciprocal_root(total, cols, p.eps);
  if (p.rstd != nullptr && active && rank == 0 && thread == 0) static_cast<A*>(p.rstd)[row] = rstd;

  O* out = row_of<O>(p.out, p.shape, row) + first_col;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    A late_scale[1][N];
    if constexpr (!kScaleEarly) load_scale(scale, first_col + v * stride, stride, cols, late_scale);
    const auto& w = kScaleEarly ? early_scale[kScaleEarly ? v : 0] : late_scale[0];
    store<Aligned>(out + v * stride, remaining(v), normalize<R, O>(h[v], rstd, p.round_normalized, w), first, last);
  }
}

// A row of any length, by one block that reads it twice: for the statistics, and for the results. Each warp adds the chunks that
// one lane adds in add_chunks.
template <class T, class R, class O, bool Aligned>
__global__ void __launch_bounds__(kMaxThreads) forward_in_a_loop(const __grid_constant__ ForwardParams p) {
  using A = Accumulate<T>;
  constexpr int N = kVectorElements<T>;
  __shared__ A sums[kWarp];
  const int lane = threadIdx.x % kWarp;
  const bool first = lane == 0, last = lane == kWarp - 1;
  const bool has_residual = p.residual.data != nullptr;

  launch_dependents();
  wait_for_predecessor();

  const int64_t row = blockIdx.x, cols = p.shape.cols;
  const T* input = row_of<const T>(p.input, p.shape, row);
  const R* residual = row_of<const R>(p.residual, p.shape, row);
  R* residual_out = row_of<R>(p.residual_out, p.shape, row);
  O* out = row_of<O>(p.out, p.shape, row);
  const auto remaining = [&](int64_t col) { return static_cast<int>(max(min(cols - col, int64_t{N}), int64_t{-N})); };
  const auto load_sum = [&](int64_t col, A(&h)[N]) {  // returns it as stored
    unpack(load<Aligned, T, N>(input + col, remaining(col)), h);
    Words<R, N> rounded = {};
    if (has_residual) {
      A addend[N];
      unpack(load<Aligned, R, N>(residual + col, remaining(col)), addend);
#pragma unroll
      for (int i = 0; i < N; ++i) h[i] += addend[i];
      rounded = pack<R, N>(h);
      if (p.round_sum) unpack(rounded, h);
    }
    return rounded;
  };

  constexpr int64_t kStep = static_cast<int64_t>(kMaxThreads) * N;
  A sum = 0;
#pragma unroll 4
  for (int64_t start = 0; start < cols; start += kStep) {
    A h[N];
    load_sum(start + threadIdx.x * N, h);
    sum += butterfly(sum_of_squares(h), kWarp);
  }
  if (lane == 0) sums[threadIdx.x / kWarp] = sum;
  __syncthreads();
  const A rstd = reciprocal_root(add_chunks(sums, kWarp, lane), cols, p.eps);
  if (p.rstd != nullptr && threadIdx.x == 0) static_cast<A*>(p.rstd)[row] = rstd;

  const Scale<A> scale{p.weight, static_cast<A>(p.offset)};
  for (int64_t start = 0; start < cols; start += kStep) {
    const int64_t col = start + threadIdx.x * N;
    A h[N], w[1][N];
    const Words<R, N> rounded = load_sum(col, h);
    load_scale(scale, col, kStep, cols, w);
    if (has_residual) store<Aligned>(residual_out + col, remaining(col), rounded, first, last);
    store<Aligned>(out + col, remaining(col), normalize<R, O>(h, rstd, p.round_normalized, w[0]), first, last);
  }
}

}  // namespace

cudaError_t launch_forward(const ForwardParams& p, const ForwardConfig& config, bool aligned, const Gpu& gpu, int device,
                           cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  dispatch_dtypes<Half, BFloat16>(p.input_dtype, p.residual_dtype, p.out_dtype, [&](auto t, auto r, auto o) {
    using T = decltype(t);
    using R = decltype(r);
    using O = decltype(o);
    const auto dispatch_alignment = [&](auto is_aligned) {
      constexpr bool kAligned = decltype(is_aligned)::value;
      Launch how;
      how.threads = dim3(config.threads, config.rows_per_block);
      how.blocks = div_up(p.shape.rows, config.rows_per_block) * config.cluster;
      how.cluster = config.cluster;
      how.dependent = gpu.hopper;
      how.device = device;
      how.stream = stream;
      if (config.vectors_per_thread == 0) {
        error = launch<forward_in_a_loop<T, R, O, kAligned>>(how, p);
        return;
      }
      const int chunks = static_cast<int>(div_up(p.shape.cols, kVectorElements<T> * kWarp));
      if (config.threads > kWarp || config.cluster > 1) {
        how.shared_bytes = kBlockBytes + config.rows_per_block * chunks * static_cast<int>(sizeof(Accumulate<T>));
      }
      const auto launch_as = [&](auto vectors, auto max_threads) {
        constexpr auto kernel =
            forward_in_registers<T, R, O, decltype(vectors)::value, decltype(max_threads)::value, kAligned>;
        error = launch<kernel>(how, p, config, chunks);
      };
      switch (config.vectors_per_thread) {
        case 1: return launch_as(Constant<1>(), Constant<1024>());
        case 2: return launch_as(Constant<2>(), Constant<1024>());
        case 4: return config.threads > 256 ? launch_as(Constant<4>(), Constant<1024>()) : launch_as(Constant<4>(), Constant<256>());
        default: return launch_as(Constant<8>(), Constant<512>());
      }
    };
    aligned ? dispatch_alignment(std::true_type()) : dispatch_alignment(std::false_type());
  });
  return error;
}

cudaError_t kernel_target(int* target) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, forward_in_a_loop<float, float, float, true>);
  if (error == cudaSuccess) *target = attributes.ptxVersion;
  return error;
}

}  // namespace fused::cuda
