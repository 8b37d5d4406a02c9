// Which threads work on a row: pure functions of the shape and the GPU, tested on the CPU for every H. They decide speed alone: the
// bits of a row do not depend on them (row_sum.cuh).
#pragma once

#include <algorithm>
#include <cstdint>

namespace fused::cuda {

struct Gpu {
  int sms;           // multiprocessors
  int shared_bytes;  // shared memory a block can have
  bool hopper;       // clusters, bulk copies, dependent launch
};

constexpr int kWarpThreads = 32;
constexpr int kMaxThreads = 1024;
constexpr int kMaxCluster = 8;  // the largest that every sm_90 GPU schedules

constexpr int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int round_up(int64_t a, int b) { return static_cast<int>(div_up(a, b)) * b; }

constexpr int next_power_of_two(int64_t value) {
  int power = 1;
  while (power < value) power *= 2;
  return power;
}

// threads * vectors_per_thread * cluster vectors cover a row; threads is a power of two up to 32 or a multiple of 32.
struct ForwardConfig {
  int threads = kMaxThreads;  // a row and block
  int rows_per_block = 1;
  int vectors_per_thread = 0;  // 1, 2, 4 or 8, held in registers; 0: one block loops over the row, twice
  int cluster = 1;             // blocks a row

};

// `vectors`: vectors in a row (16 bytes of the narrowest tensor each).
inline ForwardConfig forward_config(int64_t vectors, int64_t rows, const Gpu& gpu) {
  const auto with = [&](int vectors_per_thread, int cluster) {
    ForwardConfig config;
    config.vectors_per_thread = vectors_per_thread;
    config.cluster = cluster;
    config.threads = round_up(div_up(vectors, vectors_per_thread * cluster), kWarpThreads);
    return config;
  };
  if (vectors <= kWarpThreads) {  // several rows a warp
    ForwardConfig config = with(1, 1);
    config.threads = next_power_of_two(vectors);
    config.rows_per_block = 256 / config.threads;
    return config;
  }
  if (rows <= 2 * gpu.sms && vectors <= 8 * kMaxThreads) {  // latency: as many threads on a row as there are vectors
    if (gpu.hopper && vectors >= 1024 && rows * 8 <= 4 * gpu.sms) return with(1, 8);
    if (vectors <= kMaxThreads) return with(1, 1);
  }
  if (vectors <= 1024) {
    ForwardConfig config = with(vectors <= 64 ? 2 : 4, 1);
    config.rows_per_block = std::max(1, 128 / config.threads);
    return config;
  }
  if (vectors <= 2 * kMaxThreads) return with(2, 1);
  if (vectors <= 4 * kMaxThreads) return with(4, 1);
  if (gpu.hopper && vectors <= 8 * 512 * kMaxCluster) {
    return with(8, vectors <= 4 * 512 * 8 ? 4 : 8);
  }
  return {};
}

// Backward: persistent blocks. In a ring of `stages` stages in shared memory (Hopper; rows on 16 bytes), or, with no stages, from
// registers (vectors_per_thread 1, 2, 4) or in a loop (0).
struct BackwardConfig {
  int threads = kMaxThreads;
  int rows_per_block = 1;
  int vectors_per_thread = 0;
  int cluster = 1;
  int stages = 0;
  int blocks_per_sm = 1;
};

constexpr int kMaxStages = 4;
constexpr int kMinStages = 3;  // backward_ring.cu
constexpr int kRingAlignment = 128;

// Where the stages begin, behind the barriers and the sums.
constexpr int ring_offset(int rows_per_block, int chunks) {
  return round_up(8 * (kMaxStages + 4) + 4 * 4 * rows_per_block * chunks, kRingAlignment);
}

// Blocks of the launch: what fills the GPU, and no more than there are rows.
inline int64_t backward_blocks(const BackwardConfig& config, int64_t rows, const Gpu& gpu) {
  const int64_t resident = std::max(1, gpu.sms * config.blocks_per_sm / config.cluster);
  return std::min(div_up(rows, config.rows_per_block), resident) * config.cluster;
}

// Rows of grad_weight's partial sums that the launch writes.
inline int64_t partial_rows(const BackwardConfig& config, int64_t rows, const Gpu& gpu) {
  const int64_t blocks = backward_blocks(config, rows, gpu) / config.cluster;
  return config.stages > 0 ? blocks : blocks * config.rows_per_block;
}

// stage_bytes: what a vector takes of a stage (grad_out and twice residual_out); 0 where the ring cannot be used.
inline BackwardConfig backward_config(int64_t vectors, int stage_bytes, const Gpu& gpu) {
  BackwardConfig config;
  const auto spread = [&](int max_threads_times_rows, int vectors_per_thread) {
    config.vectors_per_thread = vectors_per_thread;
    const int64_t threads = div_up(vectors, int64_t{vectors_per_thread} * config.cluster);
    config.threads = threads <= kWarpThreads ? next_power_of_two(threads) : round_up(threads, kWarpThreads);
    if (vectors_per_thread > 1) config.threads = std::max(config.threads, kWarpThreads);
    config.rows_per_block = std::max(1, max_threads_times_rows / config.threads);
  };
  if (stage_bytes > 0) {
    constexpr int kSliceBytes = 48 * 1024;  // of a stage: four of them and the sums fit an SM's shared memory
    while (config.cluster < kMaxCluster && div_up(vectors, config.cluster) * stage_bytes > kSliceBytes) config.cluster *= 2;
    if (div_up(vectors, config.cluster) * stage_bytes <= kSliceBytes) {
      spread(256, vectors <= kWarpThreads ? 1 : 2);
      if (config.threads > 512) spread(256, 4);
      const int chunks = static_cast<int>(div_up(vectors, kWarpThreads));
      const int stage = config.rows_per_block * config.threads * config.vectors_per_thread * stage_bytes;
      const int fixed = ring_offset(config.rows_per_block, chunks) + 1024;
      for (config.blocks_per_sm = 2; config.blocks_per_sm >= 1; --config.blocks_per_sm) {
        config.stages = std::min(kMaxStages, (gpu.shared_bytes / config.blocks_per_sm - fixed) / stage);
        if (config.stages >= kMinStages) return config;
      }
    }
    config = {};
  }
  if (vectors <= 4 * 256) {
    spread(128, vectors <= kWarpThreads ? 1 : vectors <= 2 * kWarpThreads ? 2 : 4);
    config.blocks_per_sm = std::max(1, 512 / (config.threads * config.rows_per_block));
  } else {
    config.blocks_per_sm = 1;
  }
  return config;
}

}  // namespace fused::cuda
