// Backward for Hopper. One block an SM stays for the whole launch; its teams of threads work
// on rows of their own. A team has a ring of stages in shared memory; a stage holds grad_out, residual_out
// and grad_residual_out of a row (of this block's columns, where a cluster shares the row) and is filled by
// bulk copies, so that rows are on their way while one is worked on. A row that does not start on 16 bytes is
// copied with the 16-byte blocks around it, and lies in shared memory as far from a line's start as in global
// memory, which copies fastest.
//
// An iteration finishes the row whose sum the one before formed, then forms the next one's. The row's tensors
// stay in registers in between: to read them again from shared memory, and to shift them again where a row
// does not start on 16 bytes, took longer. The row's stage is filled again at once. Unaligned rows leave no
// registers for grad_residual_out, which is read when the row is finished: of their stages one is never on
// its way (stage_lag).
#include "cuda/assembly.cuh"
#include "cuda/backward.cuh"
#include "cuda/launch.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/vectors.cuh"

namespace fused::cuda {
namespace {

constexpr int kWantsGradInput = 1, kWantsGradWeight = 2;

template <class T, class R, bool Aligned>
constexpr int kRingVectors = ring_vectors(Aligned, kVectorElements<T> * sizeof(R));

template <bool Aligned>
constexpr int kStageLag = stage_lag(Aligned);

// Wants: kWantsGradInput (grad_input and, under an fp32 residual, grad_residual), kWantsGradWeight. What the
// shape decides is settled before the loop over rows, so that the vectors' loads and arithmetic interleave:
// what lies beyond the row's end is computed like the rest, on whatever shared memory holds, and left out of
// the sum and of the stores. Unaligned, grad_out and residual_out are zeros there.
template <class T, class R, class O, class W, int Wants, bool Aligned>
__global__ void __launch_bounds__(ring_threads(Aligned))
    backward_in_a_ring(const __grid_constant__ BackwardParams p,
                       const __grid_constant__ Scalars<float> scalars,
                       const __grid_constant__ BackwardConfig config,
                       const __grid_constant__ SumLayout sum_layout,
                       const __grid_constant__ RingLayout layout, float* partials) {
#if FUSED_HOPPER  // older GPUs get an empty kernel, which is never launched
  constexpr int N = kVectorElements<T>, V = kRingVectors<T, R, Aligned>, kRun = V * kWarp * N;
  constexpr int kLag = kStageLag<Aligned>;
  constexpr bool kWantsInput = Wants & kWantsGradInput, kWantsWeight = Wants & kWantsGradWeight;
  FUSED_DYNAMIC_SHARED(shared);

  // threadIdx.x counts within a team, which has a row to itself.
  const int team = threadIdx.y, lane = threadIdx.x % kWarp, stages = config.stages;
  const int threads = config.threads, cluster = config.cluster, rank = cluster > 1 ? cluster_rank() : 0;
  const int warp = (rank * threads + threadIdx.x) / kWarp;  // of the row
  const int slice = V * threads * N, slice_col = rank * slice, cols = static_cast<int>(p.shape.cols);
  const int slice_cols = max(0, min(slice, cols - slice_col));  // this block's columns
  const int warp_col = threadIdx.x / kWarp * kRun, col_of_slice = warp_col + lane * N;
  const bool has_dh = kWantsInput && p.grad_residual_out.data != nullptr,
             has_weight = p.weight.data != nullptr;
  const int remaining = slice_cols - col_of_slice;
  // Unaligned, a warp with no more than a vector a lane is spared the others' work, and one that stores the
  // end of a longer run has the most. The stages are filled by a team's last warp, unless it is such a one.
  const auto is_short = [&](int warp_col) { return !Aligned && slice_cols - warp_col <= kWarp * N; };
  const int last_warp = threads / kWarp - 1;
  const bool fills = threadIdx.x / kWarp == (Aligned || is_short(last_warp * kRun) ? last_warp : 0);

  auto* filled = reinterpret_cast<TransactionBarrier*>(shared) + team * (kMaxStages + kSumSlots);
  TransactionBarrier* exchanged = filled + kMaxStages;
  float* sums = reinterpret_cast<float*>(shared + layout.sums) + team * kSumSlots * sum_layout.slots;
  unsigned char* ring = shared + layout.ring + team * stages * layout.stage_bytes;
  if (threadIdx.x < kMaxStages + kSumSlots) {
    filled[threadIdx.x].init();
    TransactionBarrier::fence_init();
  }
  for (int slot = 0; slot < kSumSlots; ++slot)
    clear_absent_sums(sums + slot * sum_layout.slots, sum_layout, threadIdx.x);
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
  }
  __syncthreads();
  launch_dependents();
  wait_for_predecessor();

  // Teams of different SMs before those of one, so that no SM has two rows more than another.
  const int64_t clusters = divide(gridDim.x, cluster), rows = p.shape.rows, step = clusters * config.teams;
  const int64_t first_row = divide(blockIdx.x, cluster) + team * clusters;

  // By all lanes of the warp that fills, of which three copy a tensor each.
  const auto fill = [&](int64_t row, int stage) {
    const bool is_dy = lane == 0;
    const Rows& from = is_dy ? p.grad_out : lane == 1 ? p.residual_out : p.grad_residual_out;
    const int item = is_dy ? sizeof(O) : sizeof(R), place = is_dy ? 0 : lane == 1 ? layout.h : layout.dh;
    if (lane < (has_dh ? 3 : 2) && slice_cols > 0) {
      const RowIndex index(p.shape, row);
      const auto* source =
          static_cast<const char*>(from.data) +
          (index.outer * from.outer_stride + index.inner * from.inner_stride + slice_col) * item;
      const int shift = Aligned ? 0 : misalignment(source),
                offset = Aligned ? 0 : within_line(source) - shift;
      const int bytes = (shift + slice_cols * item + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
      filled[stage].expect(bytes);
      bulk_copy(ring + stage * layout.stage_bytes + place + offset, source - shift, bytes, filled[stage]);
    }
    __syncwarp();
    if (lane == 0) filled[stage].arrive_expecting(0);
  };

  for (int i = 0; i < stages - kLag; ++i) {
    const int64_t row = first_row + i * step;
    if (fills && row < rows) fill(row, i);
  }

  float scale[V][N], grad_weight[V][N] = {};
  {
    const W* weight = static_cast<const W*>(p.weight.data) + slice_col + col_of_slice;
    Words<W, N> weight_run[V];
    load_run<Aligned>(weight, has_weight ? remaining : 0, weight_run);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      unpack_scale(weight_run[v], scalars.offset, scale[v]);
      keep_in_registers(scale[v]);
    }
  }
  // Calls f with the number of vectors a lane that this warp works on.
  const auto with_vectors = [&](auto f) { is_short(warp_col) ? f(Constant<1>()) : f(Constant<V>()); };
  // Where this thread's first element of a row lies in a stage.
  const auto dy_in = [&](int stage, const RowIndex& row) {
    const int offset = Aligned ? 0 : within_line(row_of<const O>(p.grad_out, row) + slice_col);
    return reinterpret_cast<const O*>(ring + stage * layout.stage_bytes + offset) + col_of_slice;
  };
  const auto h_in = [&](int stage, int place, const Rows& tensor, const RowIndex& row) {
    const int offset =
        Aligned || tensor.data == nullptr ? 0 : within_line(row_of<const R>(tensor, row) + slice_col);
    return reinterpret_cast<const R*>(ring + stage * layout.stage_bytes + place + offset) + col_of_slice;
  };
  // Of the row whose sum was formed last.
  Words<O, N> dy_run[V];
  Words<R, N> h_run[V], dh_run[V];
  float rstd = 0;
  int stage = 0, phase = 0;  // of this iteration
  int i = 0;
  for (;; ++i) {
    const int64_t row = first_row + i * step;
    const int stage_before = stage > 0 ? stage - 1 : stages - 1;
    if (i > 0 && row - step >= rows) break;
    if (i > 0) {  // the gradients of the row before
      float projection = 0;
      if constexpr (kWantsInput) {
        const int slot = (i - 1) % kSumSlots;
        if (cluster > 1) exchanged[slot].wait_for_peers((i - 1) / kSumSlots);
        projection = mean_projection(add_warp_sums<V>(sums + slot * sum_layout.slots, sum_layout, lane), rstd,
                                     scalars.inverse_cols);
      }
      const RowIndex index(p.shape, row - step);
      T* grad_input = row_of<T>(p.grad_input, index) + slice_col + col_of_slice;
      R* grad_residual = row_of<R>(p.grad_residual, index) + slice_col + col_of_slice;
      with_vectors([&](auto vectors) {
        constexpr int kVectors = decltype(vectors)::value;
        if constexpr (kWantsInput && kLag > 0)
          load_run<Aligned, true>(h_in(stage_before, layout.dh, p.grad_residual_out, index), kRun,
                                  first<kVectors>(dh_run));
        [[maybe_unused]] Words<T, N> input_run[kVectors];
        [[maybe_unused]] Words<R, N> residual_run[kVectors];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          float dy[N], h[N];
          unpack(dy_run[v], dy);
          unpack(h_run[v], h);
          if constexpr (kWantsWeight) add_weight_gradient(grad_weight[v], dy, h, rstd);
          if constexpr (kWantsInput) {
            float dx[N];
            unpack(dh_run[v], dx);
            input_gradient(dx, dy, h, scale[v], rstd, projection);
            input_run[v] = pack<T, N>(dx);
            residual_run[v] = pack<R, N>(dx);
          }
        }
        if constexpr (kWantsInput) {
          if (std::is_same_v<T, R> || p.grad_input.data != nullptr) {
            store_run<Aligned>(grad_input, remaining, input_run, lane, kWarp);
          }
          if (!std::is_same_v<T, R> && p.grad_residual.data != nullptr) {
            store_run<Aligned>(grad_residual, remaining, residual_run, lane, kWarp);
          }
        }
      });
    }

    if (row < rows) {  // the sum of this iteration's row
      rstd = static_cast<const float*>(p.rstd)[row];
      filled[stage].wait(phase);
      const RowIndex index(p.shape, row);
      float products[V] = {};
      with_vectors([&](auto vectors) {
        constexpr int kVectors = decltype(vectors)::value;
        load_run<Aligned, true>(dy_in(stage, index), remaining, first<kVectors>(dy_run));
        load_run<Aligned, true>(h_in(stage, layout.h, p.residual_out, index), remaining,
                                first<kVectors>(h_run));
        if constexpr (kWantsInput) {
          if constexpr (kLag == 0)
            load_run<Aligned, true>(h_in(stage, layout.dh, p.grad_residual_out, index), kRun,
                                    first<kVectors>(dh_run));
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            float dy[N], h[N];
            unpack(dy_run[v], dy);
            unpack(h_run[v], h);
            const float product = weighted_product(dy, h, scale[v]);
            products[v] = !Aligned || remaining > v * kWarp * N ? product : 0.0f;
          }
        }
      });
      if constexpr (kWantsInput) {
        const float sum = warp_sum(products, lane, kWarp);
        const int slot = i % kSumSlots;
        if (cluster > 1) {
          if (threadIdx.x == 0) exchanged[slot].arrive_expecting(sum_layout.warps * sizeof(float));
          if (lane < cluster)
            store_in_peer(sums + slot * sum_layout.slots + warp, sum, exchanged[slot], lane);
        } else if (lane == 0) {
          sums[slot * sum_layout.slots + warp] = sum;
        }
      }
    }

    // This iteration's sums are written, and this stage, or the one before, has been read: it is filled
    // again.
    team_barrier(team, threads);
    const int64_t row_ahead = row + (stages - kLag) * step;
    if (fills && row_ahead < rows) fill(row_ahead, kLag > 0 ? stage_before : stage);
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }

  // A team that has had a row less than the first one passes its barrier as often: compute-sanitizer takes
  // the difference for a race.
  if (first_row + (i - 1) * step - team * clusters < rows) team_barrier(team, threads);

  if constexpr (kWantsWeight) {  // the ring is empty
    if (partials != nullptr) partials += static_cast<int64_t>(divide(blockIdx.x, cluster)) * cols;
    add_teams<Aligned>(p, partials, slice_col, slice_cols, grad_weight, shared + layout.ring, team,
                       config.teams, slice, col_of_slice);
  }
#endif
}

template <class T, class R, class O, class W, bool Aligned>
cudaError_t launch_as(const BackwardParams& p, const BackwardConfig& config, void* grad_weight_partials,
                      const Queue& queue) {
  const RowShape row = row_shape(p.shape.cols, sizeof(T), sizeof(O), sizeof(R));
  const RingLayout layout = ring_layout(config, row, Aligned);
  const Launch how = {backward_blocks(config, p.shape.rows, queue.gpu), dim3(config.threads, config.teams),
                      config.cluster, layout.bytes};
  const auto launch_with = [&](auto wants) {
    constexpr auto kernel = backward_in_a_ring<T, R, O, W, decltype(wants)::value, Aligned>;
    return launch<kernel>(how, queue, p, Scalars<float>(p.shape, p.weight, p.offset), config,
                          sum_layout(row.vectors, config.vectors_per_thread, config.threads * config.cluster),
                          layout, static_cast<float*>(grad_weight_partials));
  };
  if (p.grad_weight == nullptr) return launch_with(Constant<kWantsGradInput>());
  if (p.grad_input.data == nullptr && p.grad_residual.data == nullptr)
    return launch_with(Constant<kWantsGradWeight>());
  return launch_with(Constant<kWantsGradInput | kWantsGradWeight>());
}

}  // namespace

cudaError_t launch_backward_ring(const BackwardParams& p, const BackwardConfig& config,
                                 void* grad_weight_partials, bool aligned, const Queue& queue) {
  return dispatch(p, aligned, [&](auto t, auto r, auto o, auto w, auto is_aligned) {
    if constexpr (std::is_same_v<decltype(t), double>)
      return cudaErrorInvalidValue;
    else
      return launch_as<decltype(t), decltype(r), decltype(o), decltype(w), is_aligned>(
          p, config, grad_weight_partials, queue);
  });
}

cudaError_t resident_clusters(int cluster, int shared_bytes, int* count) {
  constexpr auto kernel = backward_in_a_ring<float, float, float, float, kWantsGradInput, true>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(cluster);
  config.blockDim = dim3(ring_threads(true));
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(count, kernel, &config);
}

}  // namespace fused::cuda
