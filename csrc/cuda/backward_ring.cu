// Backward for Hopper and rows that start on 16 bytes. Persistent blocks, each with a ring of stages in shared memory; a stage holds
// grad_out, residual_out and grad_residual_out of rows_per_block rows (of this block's columns, where a cluster shares a row) and is
// filled by bulk copies, so that several rows are on their way while one is worked on.
//
// A row is finished one iteration after its sum was formed: neither the block's nor the cluster's exchange is waited for. A stage is
// given back a block barrier later than it was last read, so three stages are the least that make progress.
#include "cuda/backward.cuh"
#include "cuda/backward.h"
#include "cuda/hopper.cuh"
#include "cuda/launch.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/vectors.cuh"
#include "dispatch.h"

namespace fused::cuda {
namespace {

// Sums in flight between blocks: a peer can be one iteration behind in reading and another ahead in writing.
constexpr int kSumSlots = 4;

template <class T, int N>
__device__ __forceinline__ Words<T, N> load_shared(const T* from) {
  Words<T, N> words;
#pragma unroll
  for (int i = 0; i < Words<T, N>::kCount / 4; ++i) {
    load_block(reinterpret_cast<const char*>(from) + i * kBlockBytes, words.word + 4 * i);
  }
  return words;
}

template <class T, class R, class O, int V>
__global__ void __launch_bounds__(512)
    backward_in_a_ring(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardConfig config, int chunks,
                       int ring_at, float* partials) {
  constexpr int N = kVectorElements<T>;
  extern __shared__ __align__(128) unsigned char shared[];

  const int threads = config.threads, warps = threads / kWarp, lanes = min(threads, kWarp);
  const int rows_per_block = config.rows_per_block, stages = config.stages, cluster = config.cluster;
  const int thread = threadIdx.x, thread_of_block = threadIdx.y * threads + thread;
  const int lane = thread_of_block % kWarp, warp_of_block = thread_of_block / kWarp;
  const int rank = cluster > 1 ? cluster_rank() : 0;
  const int slice = threads * V * N, cols = static_cast<int>(p.shape.cols);  // slice: this block's columns
  const int slice_col = rank * slice, slice_cols = max(0, min(slice, cols - slice_col));
  const bool has_dh = p.grad_residual_out.data != nullptr;
  const bool wants_dx = p.grad_input.data != nullptr || p.grad_residual.data != nullptr;

  // Shared memory: barriers, sums [kSumSlots][rows_per_block][chunks], stages.
  auto* filled = reinterpret_cast<TransactionBarrier*>(shared);
  TransactionBarrier* exchanged = filled + kMaxStages;
  auto* sums = reinterpret_cast<float*>(exchanged + kSumSlots);
  unsigned char* ring = shared + ring_at;
  const int dy_bytes = rows_per_block * slice * sizeof(O), h_bytes = rows_per_block * slice * sizeof(R);
  const int stage_bytes = dy_bytes + 2 * h_bytes;

  if (thread_of_block == 0) {
    for (int i = 0; i < stages; ++i) filled[i].init();
    for (int i = 0; i < kSumSlots; ++i) exchanged[i].init();
    TransactionBarrier::fence_init();
  }
  __syncthreads();
  if (cluster > 1) {
    cluster_arrive();
    cluster_wait();
  }
  launch_dependents();
  wait_for_predecessor();

  const int64_t groups = (p.shape.rows + rows_per_block - 1) / rows_per_block, clusters = gridDim.x / cluster;
  const int64_t first_group = blockIdx.x / cluster;
  const int64_t iterations = (groups - first_group + clusters - 1) / clusters;
  const auto row_of_iteration = [&](int64_t i) { return (first_group + i * clusters) * rows_per_block; };

  // By all lanes of warp 0: a lane copies a tensor's piece of a row.
  const auto fill = [&](int64_t iteration, int stage) {
    const int64_t row = row_of_iteration(iteration);
    const int rows = static_cast<int>(min(static_cast<int64_t>(rows_per_block), p.shape.rows - row));
    const int tensors = has_dh && wants_dx ? 3 : 2;
    unsigned char* at = ring + stage * stage_bytes;
    if (lane == 0) {
      filled[stage].arrive_expecting(rows * slice_cols * (sizeof(O) + (tensors - 1) * sizeof(R)));
    }
    __syncwarp();
    if (slice_cols == 0) return;
    for (int copy = lane; copy < rows * tensors; copy += kWarp) {
      const int r = copy / tensors, tensor = copy % tensors;
      if (tensor == 0) {
        bulk_copy(at + r * slice * sizeof(O), row_of<const O>(p.grad_out, p.shape, row + r) + slice_col, slice_cols * sizeof(O),
                  filled[stage]);
      } else {
        const Rows& from = tensor == 1 ? p.residual_out : p.grad_residual_out;
        bulk_copy(at + dy_bytes + (tensor - 1) * h_bytes + r * slice * sizeof(R),
                  row_of<const R>(from, p.shape, row + r) + slice_col, slice_cols * sizeof(R), filled[stage]);
      }
    }
  };
  if (warp_of_block == 0) {
    for (int i = 0; i < stages && i < iterations; ++i) fill(i, i);
  }

  float w[V][N], grad_weight[V][N] = {};
  load_scale(Scale<float>{p.weight, static_cast<float>(p.offset)}, slice_col + thread * N, threads * N, cols, w);

  const auto owns = [&](int v) { return (v * threads + thread) * N < slice_cols; };
  const int thread_offset = threadIdx.y * slice + thread * N;  // in a stage's tensor
  const auto dy_at = [&](int stage, int v) {
    return reinterpret_cast<const O*>(ring + stage * stage_bytes) + thread_offset + v * threads * N;
  };
  const auto h_at = [&](int stage, int v, int tensor) {
    return reinterpret_cast<const R*>(ring + stage * stage_bytes + dy_bytes + (tensor - 1) * h_bytes) + thread_offset +
           v * threads * N;
  };
  const auto sums_of = [&](int slot) { return sums + (slot * rows_per_block + threadIdx.y) * chunks; };

  int stage = 0, previous_stage = 0;
  uint32_t phase = 0;
  float rstd = 0;
  for (int64_t i = 0; i <= iterations; ++i) {
    const int slot = i % kSumSlots;
    float next_rstd = 0;
    if (i < iterations) {  // the sum of this iteration's rows
      const int64_t row = row_of_iteration(i) + threadIdx.y;
      const bool active = row < p.shape.rows;
      if (active) next_rstd = static_cast<const float*>(p.rstd)[row];
      filled[stage].wait(phase);
      if (wants_dx) {
        float products[V];
#pragma unroll
        for (int v = 0; v < V; ++v) {
          products[v] = 0;
          if (active && owns(v)) {
            float dy[N], h[N];
            unpack(load_shared<O, N>(dy_at(stage, v)), dy);
            unpack(load_shared<R, N>(h_at(stage, v, 1)), h);
            products[v] = weighted_product(dy, h, w[v]);
          }
        }
        float sum = chunk_sums(products, lane, lanes);
        constexpr int kReplicas = kWarp / V;
        if (threads <= kWarp && cluster == 1) {
          sum = add_chunks_in_warp<V>(sum);
          if (thread == 0) sums_of(slot)[0] = sum;
        } else {
          const int chunk = (rank * V + chunk_of_lane<V>(lane)) * warps + thread / kWarp;
          if (cluster == 1) {
            if (lane % kReplicas == 0 && chunk < chunks) sums_of(slot)[chunk] = sum;
          } else {
            if (thread_of_block == 0) exchanged[slot].arrive_expecting(chunks * sizeof(float));
            if (chunk < chunks) {
              for (int peer = lane % kReplicas; peer < cluster; peer += kReplicas) {
                store_in_peer(sums_of(slot) + chunk, sum, exchanged[slot], peer);
              }
            }
          }
        }
      }
    }

    if (i > 0) {  // the gradients of the iteration before
      const int64_t row = row_of_iteration(i - 1) + threadIdx.y;
      const int previous_slot = (i - 1) % kSumSlots;
      float projection = 0;
      if (wants_dx) {
        if (cluster > 1) exchanged[previous_slot].wait((i - 1) / kSumSlots);
        const float sum = threads <= kWarp && cluster == 1 ? sums_of(previous_slot)[0]
                                                           : add_chunks(sums_of(previous_slot), chunks, lane);
        projection = mean_projection(sum, rstd, cols);
      }
      if (row < p.shape.rows) {
        const int64_t col = slice_col + thread * N;
        T* grad_input = row_of<T>(p.grad_input, p.shape, row) + col;
        R* grad_residual = row_of<R>(p.grad_residual, p.shape, row) + col;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (!owns(v)) continue;
          float dy[N], h[N], dx[N] = {};
          unpack(load_shared<O, N>(dy_at(previous_stage, v)), dy);
          unpack(load_shared<R, N>(h_at(previous_stage, v, 1)), h);
          if (partials != nullptr) add_weight_gradient(grad_weight[v], dy, h, rstd);
          if (!wants_dx) continue;
          if (has_dh) unpack(load_shared<R, N>(h_at(previous_stage, v, 2)), dx);
          input_gradient(dx, dy, h, w[v], rstd, projection);
          const int offset = v * threads * N;
          if (p.grad_input.data != nullptr) store<true>(grad_input + offset, N, pack<T, N>(dx), false, false);
          if (p.grad_residual.data != nullptr) store<true>(grad_residual + offset, N, pack<R, N>(dx), false, false);
        }
      }
    }
    rstd = next_rstd;

    __syncthreads();  // this iteration's sums are written, and the stage before has been read
    if (i > 0 && warp_of_block == 0 && i - 1 + stages < iterations) fill(i - 1 + stages, previous_stage);
    previous_stage = stage;
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }

  if (partials == nullptr) return;
  // One partial row a block (a cluster's blocks own its columns): the rows of the block are added in order.
  auto* others = reinterpret_cast<float*>(ring);
#pragma unroll
  for (int v = 0; v < V; ++v) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (threadIdx.y > 0) others[((threadIdx.y - 1) * V * N + v * N + n) * threads + thread] = grad_weight[v][n];
    }
  }
  __syncthreads();
  if (threadIdx.y > 0) return;
  partials += first_group * cols + slice_col + thread * N;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    for (int r = 0; r < rows_per_block - 1; ++r) {
#pragma unroll
      for (int n = 0; n < N; ++n) grad_weight[v][n] += others[(r * V * N + v * N + n) * threads + thread];
    }
    if (!owns(v)) continue;
#pragma unroll
    for (int n = 0; n < N; n += 4) {
      *reinterpret_cast<float4*>(partials + v * threads * N + n) =
          make_float4(grad_weight[v][n], grad_weight[v][n + 1], grad_weight[v][n + 2], grad_weight[v][n + 3]);
    }
  }
}

}  // namespace

cudaError_t launch_backward_ring(const BackwardParams& p, const BackwardConfig& config, void* grad_weight_partials,
                                 const Gpu& gpu, int device, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  dispatch_dtypes<Half, BFloat16>(p.input_dtype, p.residual_dtype, p.out_dtype, [&](auto t, auto r, auto o) {
    using T = decltype(t);
    using R = decltype(r);
    using O = decltype(o);
    if constexpr (!std::is_same_v<T, double>) {
      const int chunks = static_cast<int>(div_up(p.shape.cols, kVectorElements<T> * kWarp));
      Launch how;
      how.threads = dim3(config.threads, config.rows_per_block);
      how.blocks = backward_blocks(config, p.shape.rows, gpu);
      how.cluster = config.cluster;
      const int ring_at = ring_offset(config.rows_per_block, chunks);
      how.shared_bytes = ring_at +
                         config.stages * config.rows_per_block * config.threads * config.vectors_per_thread *
                             kVectorElements<T> * static_cast<int>(sizeof(O) + 2 * sizeof(R));
      how.dependent = gpu.hopper;
      how.device = device;
      how.stream = stream;
      const auto launch_as = [&](auto vectors) {
        error = launch<backward_in_a_ring<T, R, O, decltype(vectors)::value>>(
            how, p, config, chunks, ring_at, static_cast<float*>(grad_weight_partials));
      };
      switch (config.vectors_per_thread) {
        case 1: return launch_as(Constant<1>());
        case 2: return launch_as(Constant<2>());
        default: return launch_as(Constant<4>());
      }
    }
  });
  return error;
}

}  // namespace fused::cuda
