// The kernels' configurations for every H: each vector of a row has one owner, and no limit of the GPU is
// passed. Needs no GPU.
#include "cuda/config.h"

#include <cstdio>
#include <cstdlib>

using namespace fused::cuda;

namespace {

constexpr Gpu kHopper{132, 227 * 1024, true, true, {132, 66, 30, 15, 7}};
constexpr Gpu kWorkstation{
    188, 99 * 1024, true, true, {188, 94, 47, 23, 0}};              // newer, with less shared memory
constexpr Gpu kPart{14, 227 * 1024, true, true, {14, 7, 3, 0, 0}};  // of a Hopper
constexpr Gpu kTuring{40, 64 * 1024, false, false, {40}};

int64_t cols = 0;  // under test, for the message

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "H = %lld: expected %s\n", static_cast<long long>(cols), what);
  std::exit(1);
}

bool is_row_width(int threads) {
  const bool power_of_two = (threads & (threads - 1)) == 0;
  return threads <= kWarpThreads ? power_of_two : threads % kWarpThreads == 0;
}

void check_sums(const SumLayout& layout, int64_t vectors, int vectors_per_thread) {
  check(int64_t{layout.warps} * vectors_per_thread * kWarpThreads >= vectors, "a sum of every vector");
  check(int64_t{layout.octets} * 256 >= vectors && (layout.octets - 1) * int64_t{256} < vectors,
        "octets that cover the row once");
  check(layout.lanes <= kWarpThreads && (layout.lanes >= layout.octets || layout.lanes == kWarpThreads),
        "a lane for each octet");
  check(layout.slots * vectors_per_thread >= layout.octets * 8 && layout.slots >= layout.warps &&
            layout.slots - layout.warps < 8,
        "slots for every warp and whole octets");
}

void check_forward(const RowShape& row, int64_t rows, bool aligned, const Gpu& gpu) {
  const ForwardConfig config = forward_config(row, rows, aligned, gpu);
  const int64_t vectors = row.vectors;
  const int v = config.vectors_per_thread;
  check(forward_blocks(config, rows) / config.cluster * config.rows_per_block >= rows,
        "a block for every row");
  if (config.kernel == ForwardKernel::kLoop)
    return check(vectors > 1024, "rows this short to be held at once");
  check(is_row_width(config.threads), "whole warps, or a power of two within one");
  check(int64_t{config.threads} * v * config.cluster >= vectors, "a thread for every vector");
  check(config.threads * config.rows_per_block % kWarpThreads == 0, "whole warps in a block");
  check(config.cluster == 1 || (gpu.hopper && config.rows_per_block == 1), "clusters on Hopper, a row each");
  check(gpu.clusters[log2_of(config.cluster)] > 0, "clusters that are scheduled");
  check_sums(sum_layout(vectors, v, config.threads * config.cluster), vectors, v);
  if (config.kernel == ForwardKernel::kRegisters) {
    check(v == 1 || (aligned && (v == 2 || v == 4 || (v == 8 && row.elements <= 4))),
          "a kernel that is compiled");
    check(config.threads * config.rows_per_block <= forward_threads(v), "a block that fits");
    check(config.threads >= kWarpThreads || v == 1, "one vector a thread where rows share a warp");
    return;
  }
  check(v == kSharedVectors && config.rows_per_block == 1, "a kernel that is compiled");
  check(config.threads >= kWarpThreads && config.threads <= kSharedThreads, "a block that fits");
  check(slice_layout(config, vectors, 8, 16, row.residual_bytes).bytes <= gpu.shared_bytes,
        "a slice that fits");
}

bool fits_in_a_ring(const RowShape& row, bool aligned, const Gpu& gpu) {
  BackwardConfig config;
  config.kernel = BackwardKernel::kRing;
  config.vectors_per_thread = ring_vectors(aligned, row.residual_bytes);
  config.stages = min_stages(aligned);
  config.cluster = largest_cluster(gpu, kMaxCluster);
  config.threads = threads_of_row(div_up(row.vectors, config.cluster), config.vectors_per_thread);
  return config.threads <= ring_threads(aligned) &&
         ring_layout(config, row, aligned).bytes <= gpu.shared_bytes;
}

void check_backward(const RowShape& row, int64_t rows, bool aligned, bool ring, const Gpu& gpu) {
  const BackwardConfig config = backward_config(row, rows, aligned, ring, gpu);
  const int64_t vectors = row.vectors;
  const int v = config.vectors_per_thread;
  const int64_t blocks = backward_blocks(config, rows, gpu);
  check(blocks >= 1 && blocks % config.cluster == 0, "whole clusters");
  const int64_t partials = partial_rows(config, rows, gpu);
  check(partials == blocks / config.cluster ||
            (partials == 0 && (blocks == config.cluster || config.columns_apart)),
        "a row of partial sums a cluster");
  check(!config.columns_apart || config.kernel == BackwardKernel::kRegisters, "a kernel with such blocks");
  if (config.kernel == BackwardKernel::kLoop) {
    check(vectors > 1024, "rows this short to be held in registers");
    return check(!ring || !fits_in_a_ring(row, aligned, gpu), "a ring where one team's stages fit");
  }
  check(is_row_width(config.threads), "whole warps, or a power of two within one");
  check(int64_t{config.threads} * v * config.cluster >= vectors, "a thread for every vector");
  check(config.threads >= kWarpThreads || v == 1, "one vector a thread where rows share a warp");
  check_sums(sum_layout(vectors, v, config.threads * config.cluster), vectors, v);
  if (config.kernel == BackwardKernel::kRegisters) {
    const int threads = config.threads * config.rows_per_block;
    check(threads <= backward_threads(v) && threads % kWarpThreads == 0, "a block that fits");
    return;
  }
  check(ring && gpu.hopper, "a ring only where it can be used");
  check(v == ring_vectors(aligned, row.residual_bytes), "a kernel that is compiled");
  check(config.stages >= min_stages(aligned) && config.stages <= kMaxStages,
        "stages enough to make progress");
  check(config.threads >= kWarpThreads && config.threads * config.teams <= ring_threads(aligned),
        "a block that fits");
  check(config.teams < 16, "a named barrier for every team");
  const RingLayout layout = ring_layout(config, row, aligned);
  check(layout.bytes <= gpu.shared_bytes, "stages that fit");
  const auto holds = [&](int bytes, int of_a_vector) {
    return bytes >= config.threads * v * of_a_vector + (aligned ? 0 : kLineBytes);
  };
  check(holds(layout.h, row.out_bytes) && holds(layout.dh - layout.h, row.residual_bytes) &&
            holds(layout.stage_bytes - layout.dh, row.residual_bytes),
        "a row's start within a line, and a block read beyond its end");
  check(gpu.clusters[log2_of(config.cluster)] > 0, "clusters that are scheduled");
}

}  // namespace

int main() {
  check(workers(4096, 264) == 256 && workers(5, 132) == 5 && workers(133, 132) == 67,
        "an even share of turns");
  for (cols = 1; cols <= 300000; ++cols) {
    for (const RowShape& row : {row_shape(cols, 2, 2, 2), row_shape(cols, 2, 2, 4), row_shape(cols, 2, 4, 4),
                                row_shape(cols, 4, 4, 4), row_shape(cols, 8, 8, 8)}) {
      for (const bool aligned : {true, false}) {
        for (const Gpu& gpu : {kHopper, kWorkstation, kPart, kTuring}) {
          for (const int64_t rows : {1, 2, 16, 17, 64, 132, 133, 264, 265, 4096, 1000000})
            check_forward(row, rows, aligned, gpu);
          for (const int64_t rows : {int64_t{1}, int64_t{gpu.sms}, int64_t{gpu.sms} + 1, int64_t{1000}})
            check_backward(row, rows, aligned, false, gpu);
        }
        if (row.elements == 2) continue;  // fp64 has no ring
        for (const int64_t rows : {1, 64, 132, 133, 200, 1000000}) {
          for (const Gpu& gpu : {kHopper, kWorkstation, kPart}) check_backward(row, rows, aligned, true, gpu);
        }
      }
    }
  }
  std::puts("every configuration holds");
}
