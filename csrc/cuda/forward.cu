// Forward. Bytes per row: input and residual read once, out and residual_out written once; the weight comes
// from the L1 cache.
#include "cuda/assembly.cuh"
#include "cuda/forward.h"
#include "cuda/launch.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/vectors.cuh"
#include "dispatch.h"

namespace fused::cuda {
namespace {

// A grid this small launches the next kernel first thing; a larger one when its loads are under way, since
// the next kernel's blocks would wait in its place.
constexpr int kBlocksThatLaunchFirst = 64;

template <class R, int N, class A>
__device__ __forceinline__ void round_to(A (&values)[N]) {
  unpack(pack<R, N>(values), values);
}

// h of one vector, as the statistics see it; returns it as stored. Without a residual it is the input.
template <class T, class R, int N, class A>
__device__ __forceinline__ Words<R, N> add(const Words<T, N>& input, const Words<R, N>& residual,
                                           bool has_residual, bool round_sum, A (&h)[N]) {
  unpack(input, h);
  if (!has_residual) return {};
  A addend[N];
  unpack(residual, addend);
#pragma unroll
  for (int i = 0; i < N; ++i) h[i] += addend[i];
  const Words<R, N> rounded = pack<R, N>(h);
  if (round_sum) unpack(rounded, h);
  return rounded;
}

template <int N, class A>
__device__ __forceinline__ A sum_of_squares(const A (&h)[N]) {
  A sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) sum = fma(h[i], h[i], sum);
  return sum;
}

template <class A>
__device__ __forceinline__ A reciprocal_root(A sum_of_squares, A inverse_cols, double eps) {
  return rsqrt(fma(sum_of_squares, inverse_cols, static_cast<A>(eps)));
}

// out of one vector of h.
template <class R, class O, class W, int N, class A>
__device__ __forceinline__ Words<O, N> normalize(const ForwardParams& p, const A (&h)[N], A rstd,
                                                 const Words<W, N>& weight) {
  A values[N], scale[N];
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = h[i] * rstd;
  if (p.round_normalized) round_to<R>(values);
  unpack_scale(weight, p.weight.data != nullptr, static_cast<A>(p.offset), scale);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] *= scale[i];
  return pack<O, N>(values);
}

// A row in the registers of `threads` threads, of `cluster` blocks where Clustered: read once, written once.
template <class T, class R, class O, class W, int V, int MaxThreads, bool Aligned, bool Clustered>
__global__ void __launch_bounds__(MaxThreads)
    forward_in_registers(const __grid_constant__ ForwardParams p,
                         const __grid_constant__ ForwardConfig config,
                         const __grid_constant__ SumLayout layout) {
  using A = Accumulate<T>;
  constexpr int N = kVectorElements<T>,
                kStride = kWarp * N;  // columns from one of a thread's vectors to the next
  constexpr bool kWeightFirst =
      V <= 2;  // latency counts, and the registers are there; else it arrives during the exchange
  FUSED_DYNAMIC_SHARED(shared);
  auto& barrier = *reinterpret_cast<TransactionBarrier*>(shared);
  A* sums = reinterpret_cast<A*>(shared + kBlockBytes) + threadIdx.y * layout.warps;

  const int threads = config.threads, lanes = min(threads, kWarp), thread = threadIdx.x;
  const int lane = (threadIdx.y * threads + thread) % kWarp;
  int warp = thread / kWarp;  // of the row
  int64_t row = static_cast<int64_t>(blockIdx.x) * config.rows_per_block + threadIdx.y;
  if constexpr (Clustered) {
    warp += cluster_rank() * (threads / kWarp);
    row = blockIdx.x / config.cluster;
    if (thread == 0) {
      barrier.init();
      TransactionBarrier::fence_init();
    }
    cluster_arrive();
  }

  const bool active = row < p.shape.rows;
  const int cols = static_cast<int>(p.shape.cols), first_col = (warp * V * kWarp + thread % kWarp) * N;
  const auto remaining = [&](int v) { return (active ? cols - first_col : -N) - v * kStride; };
  const bool has_residual = p.residual.data != nullptr, has_weight = p.weight.data != nullptr;
  const RowIndex index(p.shape, row);
  const T* input = row_of<const T>(p.input, index) + first_col;
  const R* residual = row_of<const R>(p.residual, index) + first_col;
  R* residual_out = row_of<R>(p.residual_out, index) + first_col;
  O* out = row_of<O>(p.out, index) + first_col;
  const W* weight = static_cast<const W*>(p.weight.data) + first_col;
  const A inverse_cols = A(1) / static_cast<A>(cols);
  finish_before_waiting(input, residual, residual_out, out, weight);

  const bool launch_first = gridDim.x < kBlocksThatLaunchFirst;
  if (launch_first) launch_dependents();
  wait_for_predecessor();

  Words<T, N> x[V];
  Words<R, N> r[V];
  Words<W, N> w[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    x[v] = load<Aligned, T, N>(input + v * kStride, remaining(v));
    r[v] = load<Aligned, R, N>(residual + v * kStride, has_residual ? remaining(v) : 0);
  }
  const auto load_weight = [&] {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      w[v] = load<Aligned, W, N>(weight + v * kStride, has_weight ? cols - first_col - v * kStride : 0);
    }
  };
  if constexpr (kWeightFirst) load_weight();
  if (!launch_first) launch_dependents();

  A h[V][N], squares[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    r[v] = add(x[v], r[v], has_residual, p.round_sum, h[v]);
    squares[v] = sum_of_squares(h[v]);
  }
  if (has_residual) store_run<Aligned>(residual_out, remaining(0), r, thread % kWarp, lanes);
  if constexpr (!kWeightFirst) load_weight();

  A total = warp_sum(squares, lane, lanes);
  if constexpr (Clustered) {
    cluster_wait();  // every block's barrier is initialised
    if (thread == 0) barrier.arrive_expecting(layout.warps * sizeof(A));
    if (warp < layout.warps && lane < config.cluster) store_in_peer(sums + warp, total, barrier, lane);
    barrier.wait(0);
    total = add_warp_sums<V>(sums, layout, lane);
  } else if (threads > kWarp) {
    if (lane == 0 && warp < layout.warps) sums[warp] = total;
    __syncthreads();
    total = add_warp_sums<V>(sums, layout, lane);
  }

  const A rstd = reciprocal_root(total, inverse_cols, p.eps);
  if (p.rstd != nullptr && active && first_col == 0) static_cast<A*>(p.rstd)[row] = rstd;
  Words<O, N> y[V];
#pragma unroll
  for (int v = 0; v < V; ++v) y[v] = normalize<R, O>(p, h[v], rstd, w[v]);
  store_run<Aligned>(out, remaining(0), y, thread % kWarp, lanes);
}

// A row of any length, by one block that reads it twice: for the statistics, and for the results. A warp adds
// the octets that one lane adds in add_warp_sums.
template <class T, class R, class O, class W, bool Aligned>
__global__ void __launch_bounds__(kMaxThreads) forward_in_a_loop(const __grid_constant__ ForwardParams p) {
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
  const auto load_sum = [&](int64_t col, A(&h)[N]) {
    const Words<R, N> r = load<Aligned, R, N>(residual + col, has_residual ? remaining(col) : 0);
    return add(load<Aligned, T, N>(input + col, remaining(col)), r, has_residual, p.round_sum, h);
  };

  A sum = 0;
  for (int64_t start = threadIdx.x / kWarp * kOctet * kWarp * N; start < cols; start += kOctet * kStep) {
    A squares[kOctet];
#pragma unroll
    for (int chunk = 0; chunk < kOctet; ++chunk) {
      A h[N];
      load_sum(start + (chunk * kWarp + lane) * N, h);
      squares[chunk] = sum_of_squares(h);
    }
    sum += warp_sum(squares, lane, kWarp);
  }
  if (lane == 0) sums[threadIdx.x / kWarp] = sum;
  __syncthreads();
  const A total = add_warp_sums<kOctet>(sums, {kWarp, kWarp, kWarp}, lane);
  const A rstd = reciprocal_root(total, A(1) / static_cast<A>(cols), p.eps);
  if (p.rstd != nullptr && threadIdx.x == 0) static_cast<A*>(p.rstd)[row] = rstd;

  for (int64_t start = 0; start < cols; start += kStep) {
    const int64_t col = start + threadIdx.x * N;
    A h[N];
    const Words<R, N> rounded[1] = {load_sum(col, h)};
    const auto w =
        load<Aligned, W, N>(static_cast<const W*>(p.weight.data) + col, has_weight ? remaining(col) : 0);
    if (has_residual) store_run<Aligned>(residual_out + col, remaining(col), rounded, lane, kWarp);
    const Words<O, N> y[1] = {normalize<R, O>(p, h, rstd, w)};
    store_run<Aligned>(out + col, remaining(col), y, lane, kWarp);
  }
}

}  // namespace

cudaError_t launch_forward(const ForwardParams& p, const ForwardConfig& config, bool aligned, const Gpu& gpu,
                           int device, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  dispatch_dtypes<Half, BFloat16>(
      p.input_dtype, p.residual_dtype, p.out_dtype, p.weight.dtype, [&](auto t, auto r, auto o, auto w) {
        using T = decltype(t);
        using R = decltype(r);
        using O = decltype(o);
        using W = decltype(w);
        using A = Accumulate<T>;
        const SumLayout layout =
            sum_layout(div_up(p.shape.cols, kVectorElements<T>), std::max(1, config.vectors_per_thread));
        Launch how;
        how.threads = dim3(config.threads, config.rows_per_block);
        how.blocks = div_up(p.shape.rows, config.rows_per_block) * config.cluster;
        how.cluster = config.cluster;
        how.dependent = gpu.dependent;
        how.device = device;
        how.stream = stream;
        const auto dispatch_alignment = [&](auto is_aligned) {
          constexpr bool kAligned = decltype(is_aligned)::value;
          if (config.vectors_per_thread == 0) {
            error = launch<forward_in_a_loop<T, R, O, W, kAligned>>(how, p);
            return;
          }
          if (config.threads > kWarp || config.cluster > 1) {
            how.shared_bytes =
                kBlockBytes + config.rows_per_block * layout.warps * static_cast<int>(sizeof(A));
          }
          const auto launch_as = [&](auto vectors, auto max_threads, auto clustered) {
            constexpr auto kernel =
                forward_in_registers<T, R, O, W, decltype(vectors)::value, decltype(max_threads)::value,
                                     kAligned, decltype(clustered)::value>;
            error = launch<kernel>(how, p, config, layout);
          };
          const bool clustered = config.cluster > 1;
          switch (config.vectors_per_thread) {
            case 1:
              return clustered ? launch_as(Constant<1>(), Constant<1024>(), std::true_type())
                               : launch_as(Constant<1>(), Constant<1024>(), std::false_type());
            case 2:
              return launch_as(Constant<2>(), Constant<1024>(), std::false_type());
            case 4:
              return config.threads <= 256 ? launch_as(Constant<4>(), Constant<256>(), std::false_type())
                                           : launch_as(Constant<4>(), Constant<1024>(), std::false_type());
            default:
              return launch_as(Constant<8>(), Constant<512>(), std::true_type());
          }
        };
        aligned ? dispatch_alignment(std::true_type()) : dispatch_alignment(std::false_type());
      });
  return error;
}

cudaError_t kernel_target(int* target) {
  cudaFuncAttributes attributes;
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, forward_in_a_loop<float, float, float, float, true>);
  if (error == cudaSuccess) *target = attributes.ptxVersion;
  return error;
}

}  // namespace fused::cuda
