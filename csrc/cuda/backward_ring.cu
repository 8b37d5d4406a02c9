// Backward for Hopper. One block an SM stays for the whole launch; its teams of threads work
// on rows of their own. A team has a ring of stages in shared memory; a stage holds grad_out, residual_out
// and grad_residual_out of a row (of this block's columns, where a cluster shares the row) and is filled by
// bulk copies, so that rows are on their way while one is worked on. A row that does not start on 16 bytes is
// copied with the 16-byte blocks around it, and lies in shared memory as far from 16 bytes as in global
// memory.
//
// A row is finished one iteration after its sum was formed: neither the team's nor the cluster's exchange is
// waited for. A stage is given back a barrier later than it was last read, so three stages are the least that
// make progress.
#include "cuda/assembly.cuh"
#include "cuda/backward.cuh"
#include "cuda/backward.h"
#include "cuda/launch.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/vectors.cuh"
#include "dispatch.h"

namespace fused::cuda {
namespace {

constexpr int kWantsGradInput = 1, kWantsGradWeight = 2;

// Wants: kWantsGradInput (grad_input and, under an fp32 residual, grad_residual), kWantsGradWeight. What the
// shape decides is settled before the loop over rows: within it, a vector beyond the row's end is computed
// like the others, on whatever shared memory holds, and left out of the sum and of the stores, so that the
// vectors' loads and arithmetic interleave.
template <class T, class R, class O, class W, int V, int MaxThreads, int Wants, bool Aligned>
__global__ void __launch_bounds__(MaxThreads)
    backward_in_a_ring(const __grid_constant__ BackwardParams p,
                       const __grid_constant__ BackwardConfig config,
                       const __grid_constant__ SumLayout sum_layout,
                       const __grid_constant__ RingLayout layout, float* partials) {
#if FUSED_HOPPER  // older GPUs get an empty kernel, which is never launched
  constexpr int N = kVectorElements<T>,
                kStride = kWarp * N;  // columns from one of a thread's vectors to the next
  constexpr bool kWantsInput = Wants & kWantsGradInput, kWantsWeight = Wants & kWantsGradWeight;
  FUSED_DYNAMIC_SHARED(shared);

  // threadIdx.x counts within a team, which has a row to itself.
  const int team = threadIdx.y, lane = threadIdx.x % kWarp, stages = config.stages;
  const int threads = config.threads, cluster = config.cluster,
            warps = threads / kWarp;                                                  // of a row and block
  const int warp = (cluster > 1 ? cluster_rank() * warps : 0) + threadIdx.x / kWarp;  // of the row
  const int slice = V * threads * N, slice_col = warp / warps * slice, cols = static_cast<int>(p.shape.cols);
  const int slice_cols = max(0, min(slice, cols - slice_col));  // this block's columns
  const int col_of_slice = (threadIdx.x / kWarp * V * kWarp + lane) * N;
  const bool has_dh = kWantsInput && p.grad_residual_out.data != nullptr,
             has_weight = p.weight.data != nullptr;
  const float inverse_cols = 1.0f / static_cast<float>(cols), offset = static_cast<float>(p.offset);
  const auto remaining = [&](int v) { return slice_cols - col_of_slice - v * kStride; };
  // Aligned, a vector is inside or outside as a whole, and those outside are read too.
  const auto readable = [&](int v) { return Aligned ? N : remaining(v); };

  auto* filled = reinterpret_cast<TransactionBarrier*>(shared) + team * (kMaxStages + kSumSlots);
  TransactionBarrier* exchanged = filled + kMaxStages;
  float* sums = reinterpret_cast<float*>(shared + layout.sums) + team * kSumSlots * sum_layout.warps;
  unsigned char* ring = shared + layout.ring + team * stages * layout.stage_bytes;
  if (threadIdx.x < kMaxStages + kSumSlots) {
    filled[threadIdx.x].init();
    TransactionBarrier::fence_init();
  }
  if (kWantsInput && !has_dh) {  // read as zeros
    for (int at = threadIdx.x * kBlockBytes; at < stages * layout.stage_bytes;
         at += blockDim.x * kBlockBytes) {
      *reinterpret_cast<uint4*>(ring + at) = {};
    }
    fence_bulk_copies();
  }
  if (cluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  launch_dependents();
  wait_for_predecessor();

  // Teams of different SMs before those of one, so that no SM has two rows more than another.
  const int64_t clusters = gridDim.x / cluster, step = clusters * config.teams;
  const int64_t first_row = blockIdx.x / cluster + team * clusters;
  const int iterations =
      first_row < p.shape.rows ? static_cast<int>((p.shape.rows - first_row + step - 1) / step) : 0;

  // By all lanes of the team's first warp, of which three copy a tensor each.
  const auto fill = [&](int64_t row, int stage) {
    const bool is_dy = lane == 0;
    const Rows& from = is_dy ? p.grad_out : lane == 1 ? p.residual_out : p.grad_residual_out;
    const int item = is_dy ? sizeof(O) : sizeof(R), place = is_dy ? 0 : lane == 1 ? layout.h : layout.dh;
    if (lane < (has_dh ? 3 : 2) && slice_cols > 0) {
      const RowIndex index(p.shape, row);
      const auto* source =
          static_cast<const char*>(from.data) +
          (index.outer * from.outer_stride + index.inner * from.inner_stride + slice_col) * item;
      const int shift = Aligned ? 0 : misalignment(source);
      const int bytes = (shift + slice_cols * item + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
      filled[stage].expect(bytes);
      bulk_copy(ring + stage * layout.stage_bytes + place, source - shift, bytes, filled[stage]);
    }
    __syncwarp();
    if (lane == 0) filled[stage].arrive_expecting(0);
  };

  float scale[V][N], grad_weight[V][N] = {};
  // Where this thread's first element of a row lies in a stage.
  const auto dy_in = [&](const unsigned char* at, const RowIndex& row) {
    const int shift = Aligned ? 0 : misalignment(row_of<const O>(p.grad_out, row) + slice_col);
    return reinterpret_cast<const O*>(at + shift) + col_of_slice;
  };
  const auto h_in = [&](const unsigned char* at, const Rows& tensor, const RowIndex& row) {
    const int shift =
        Aligned || tensor.data == nullptr ? 0 : misalignment(row_of<const R>(tensor, row) + slice_col);
    return reinterpret_cast<const R*>(at + shift) + col_of_slice;
  };
  int stage = 0, phase = 0;  // of this iteration
  float rstd = 0;
  const unsigned char* previous = nullptr;
  for (int i = -stages; i <= iterations; ++i) {
    const unsigned char* at = ring + stage * layout.stage_bytes;
    const int64_t row = first_row + i * step;
    float next_rstd = 0;
    if (i >= 0 && i < iterations) {  // the sum of this iteration's row
      next_rstd = static_cast<const float*>(p.rstd)[row];
      filled[stage].wait(phase);
      if constexpr (kWantsInput) {
        const RowIndex index(p.shape, row);
        const O* dy_at = dy_in(at, index);
        const R* h_at = h_in(at + layout.h, p.residual_out, index);
        float products[V];
#pragma unroll
        for (int v = 0; v < V; ++v) {
          float dy[N], h[N];
          unpack(load<Aligned, O, N>(dy_at + v * kStride, readable(v)), dy);
          unpack(load<Aligned, R, N>(h_at + v * kStride, readable(v)), h);
          const float product = weighted_product(dy, h, scale[v]);
          products[v] = remaining(v) > 0 ? product : 0.0f;
        }
        const float sum = warp_sum(products, lane, kWarp);
        const int slot = i % kSumSlots;
        if (cluster > 1) {
          if (threadIdx.x == 0) exchanged[slot].arrive_expecting(sum_layout.warps * sizeof(float));
          if (warp < sum_layout.warps && lane < cluster) {
            store_in_peer(sums + slot * sum_layout.warps + warp, sum, exchanged[slot], lane);
          }
        } else if (lane == 0 && warp < sum_layout.warps) {
          sums[slot * sum_layout.warps + warp] = sum;
        }
      }
    }

    if (i > 0) {  // the gradients of the iteration before
      float projection = 0;
      if constexpr (kWantsInput) {
        const int slot = (i - 1) % kSumSlots;
        if (cluster > 1) exchanged[slot].wait((i - 1) / kSumSlots);
        projection = mean_projection(add_warp_sums<V>(sums + slot * sum_layout.warps, sum_layout, lane), rstd,
                                     inverse_cols);
      }
      const RowIndex index(p.shape, row - step);
      T* grad_input = row_of<T>(p.grad_input, index) + slice_col + col_of_slice;
      R* grad_residual = row_of<R>(p.grad_residual, index) + slice_col + col_of_slice;
      const O* dy_at = dy_in(previous, index);
      const R* h_at = h_in(previous + layout.h, p.residual_out, index);
      const R* dh_at = h_in(previous + layout.dh, p.grad_residual_out, index);
      Words<T, N> input_run[V];
      Words<R, N> residual_run[V];
#pragma unroll
      for (int v = 0; v < V; ++v) {
        float dy[N], h[N];
        unpack(load<Aligned, O, N>(dy_at + v * kStride, readable(v)), dy);
        unpack(load<Aligned, R, N>(h_at + v * kStride, readable(v)), h);
        if constexpr (kWantsWeight) add_weight_gradient(grad_weight[v], dy, h, rstd);
        if constexpr (kWantsInput) {
          float dx[N];
          unpack(load<Aligned, R, N>(dh_at + v * kStride, readable(v)), dx);
          input_gradient(dx, dy, h, scale[v], rstd, projection);
          input_run[v] = pack<T, N>(dx);
          residual_run[v] = pack<R, N>(dx);
        }
      }
      if constexpr (kWantsInput) {
        if (std::is_same_v<T, R> || p.grad_input.data != nullptr) {
          store_run<Aligned>(grad_input, remaining(0), input_run, lane, kWarp);
        }
        if (!std::is_same_v<T, R> && p.grad_residual.data != nullptr) {
          store_run<Aligned>(grad_residual, remaining(0), residual_run, lane, kWarp);
        }
      }
    }
    rstd = next_rstd;

    // This iteration's sums are written, and the stage before has been read: it is filled again.
    if (i >= 0) team_barrier(team, threads);
    const int ahead = i < 0 ? i + stages : i == 0 ? iterations : i - 1 + stages;
    if (threadIdx.x < kWarp && ahead < iterations) {
      fill(first_row + ahead * step, i < 0 ? ahead : stage == 0 ? stages - 1 : stage - 1);
    }
    if (i == -1) {  // the first rows are on their way
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const W* weight = static_cast<const W*>(p.weight.data) + slice_col + col_of_slice + v * kStride;
        unpack_scale(load<Aligned, W, N>(weight, has_weight ? remaining(v) : 0), has_weight, offset,
                     scale[v]);
        keep_in_registers(scale[v]);
      }
    }
    if (i < 0) continue;
    previous = at;
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }

  if constexpr (kWantsWeight) {
    partials +=
        (blockIdx.x / cluster * config.teams + team) * static_cast<int64_t>(cols) + slice_col + col_of_slice;
    Words<float, N> run[V];
#pragma unroll
    for (int v = 0; v < V; ++v) run[v] = pack<float, N>(grad_weight[v]);
    store_run<Aligned>(partials, remaining(0), run, lane, kWarp);
  }
#endif
}

}  // namespace

cudaError_t launch_backward_ring(const BackwardParams& p, const BackwardConfig& config,
                                 void* grad_weight_partials, bool aligned, const Gpu& gpu, int device,
                                 cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  dispatch_dtypes<Half, BFloat16>(
      p.input_dtype, p.residual_dtype, p.out_dtype, p.weight.dtype, [&](auto t, auto r, auto o, auto w) {
        using T = decltype(t);
        using R = decltype(r);
        using O = decltype(o);
        using W = decltype(w);
        if constexpr (!std::is_same_v<T, double>) {
          constexpr int N = kVectorElements<T>;
          const int64_t vectors = div_up(p.shape.cols, N);
          const RingLayout layout = ring_layout(config, vectors, N * sizeof(O), N * sizeof(R), aligned);
          Launch how;
          how.threads = dim3(config.threads, config.teams);
          how.blocks = backward_blocks(config, p.shape.rows, gpu);
          how.cluster = config.cluster;
          how.shared_bytes = layout.bytes;
          how.dependent = gpu.dependent;
          how.device = device;
          how.stream = stream;
          const auto launch_as = [&](auto max_threads, auto wants, auto is_aligned) {
            constexpr auto kernel = backward_in_a_ring<T, R, O, W, kRingVectors, decltype(max_threads)::value,
                                                       decltype(wants)::value, decltype(is_aligned)::value>;
            error = launch<kernel>(how, p, config, sum_layout(vectors, kRingVectors), layout,
                                   static_cast<float*>(grad_weight_partials));
          };
          const auto dispatch_wants = [&](auto max_threads, auto is_aligned) {
            const bool wants_input = p.grad_input.data != nullptr || p.grad_residual.data != nullptr;
            if (grad_weight_partials == nullptr)
              return launch_as(max_threads, Constant<kWantsGradInput>(), is_aligned);
            wants_input ? launch_as(max_threads, Constant<kWantsGradInput | kWantsGradWeight>(), is_aligned)
                        : launch_as(max_threads, Constant<kWantsGradWeight>(), is_aligned);
          };
          // Up to 256 threads a thread may have the 220 registers that its vectors want; beyond, it has 168
          // and spills a few.
          if (!aligned) {
            dispatch_wants(Constant<kRingThreads>(), std::false_type());
          } else if (how.threads.x * how.threads.y <= 256) {
            dispatch_wants(Constant<256>(), std::true_type());
          } else {
            dispatch_wants(Constant<kRingThreads>(), std::true_type());
          }
        }
      });
  return error;
}

cudaError_t resident_clusters(int cluster, int shared_bytes, int* count) {
  constexpr auto kernel =
      backward_in_a_ring<float, float, float, float, kRingVectors, kRingThreads, kWantsGradInput, true>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(cluster);
  config.blockDim = dim3(kRingThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(count, kernel, &config);
}

}  // namespace fused::cuda
