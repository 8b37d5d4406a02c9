// Which threads work on a row: pure functions of the shape and the GPU, tested on the CPU for every H. They
// decide speed alone: the bits of a row do not depend on them (row_sum.cuh).
#pragma once

#include <algorithm>
#include <cstdint>

namespace fused::cuda {

struct Gpu {
  int sms;           // multiprocessors
  int shared_bytes;  // shared memory a block can have
  bool hopper;       // clusters, bulk copies
  bool dependent;    // dependent launch
  int clusters[5];   // resident at a time, of 1, 2, 4, 8 and 16 blocks that fill an SM (Hopper)
};

constexpr int kWarpThreads = 32;
constexpr int kMaxThreads = 1024;
constexpr int kPortableCluster = 8;  // the largest that every sm_90 GPU schedules
constexpr int kMaxCluster = 16;

constexpr int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int round_up(int64_t a, int b) { return static_cast<int>(div_up(a, b)) * b; }

constexpr int next_power_of_two(int64_t value) {
  int power = 1;
  while (power < value) power *= 2;
  return power;
}

// Threads on a row that `vectors` of them cover: a power of two up to 32, or a multiple of 32.
inline int threads_of_row(int64_t vectors, int vectors_per_thread) {
  const int64_t threads = div_up(vectors, vectors_per_thread);
  if (threads > kWarpThreads) return round_up(threads, kWarpThreads);
  return vectors_per_thread == 1 ? next_power_of_two(threads) : kWarpThreads;
}

// How the warps' sums of a row are added up (row_sum.cuh).
struct SumLayout {
  int warps;   // of a row, of all its blocks, that have vectors
  int octets;  // of chunks
  int lanes;   // as many as there are octets, at most 32, a power of two
};

inline SumLayout sum_layout(int64_t vectors, int vectors_per_thread) {
  constexpr int64_t kOctetVectors = 8 * kWarpThreads;
  SumLayout layout;
  layout.warps = static_cast<int>(div_up(vectors, int64_t{vectors_per_thread} * kWarpThreads));
  layout.octets = static_cast<int>(div_up(vectors, kOctetVectors));
  layout.lanes = next_power_of_two(std::min(layout.octets, kWarpThreads));
  return layout;
}

// Forward. In registers, threads * vectors_per_thread * cluster vectors cover a row; with no vectors, one
// block reads a row twice.
struct ForwardConfig {
  int threads = kMaxThreads;   // a row and block
  int vectors_per_thread = 0;  // 1, 2, 4 or 8
  int rows_per_block = 1;
  int cluster = 1;  // blocks a row (Hopper)
};

inline ForwardConfig forward_in_registers(int64_t vectors, int vectors_per_thread, int cluster = 1) {
  return {threads_of_row(div_up(vectors, cluster), vectors_per_thread), vectors_per_thread, 1, cluster};
}

// `vectors`: in a row, 16 bytes of the narrowest tensor each; `aligned`: as in launch_forward.
inline ForwardConfig forward_config(int64_t vectors, int64_t rows, bool aligned, const Gpu& gpu) {
  if (vectors <= kWarpThreads) {  // several rows a warp
    ForwardConfig config = forward_in_registers(vectors, 1);
    config.rows_per_block = 256 / config.threads;
    return config;
  }
  if (rows <= 2 * gpu.sms &&
      vectors <= 8 * kMaxThreads) {  // latency: as many threads on a row as there are vectors
    if (gpu.hopper && vectors >= 512 && rows <= 16) return forward_in_registers(vectors, 1, 8);
    if (gpu.hopper && vectors >= 1024 && rows <= gpu.sms)
      return forward_in_registers(vectors, vectors <= 1024 ? 1 : 8, 2);
    if (vectors <= 512) return forward_in_registers(vectors, rows > gpu.sms / 2 ? 2 : 1);
    if (vectors <= 1024) return forward_in_registers(vectors, 2);
  }
  if (vectors <= 64) {
    ForwardConfig config = forward_in_registers(vectors, 2);
    config.rows_per_block = 2;
    return config;
  }
  if (vectors <= (aligned ? 512 : 1024))
    return forward_in_registers(vectors, 4);  // unaligned, a run of 4 has fewer ends
  if (vectors <= 1024) return forward_in_registers(vectors, 2);
  if (vectors <= 4096) return forward_in_registers(vectors, 4);
  if (gpu.hopper && vectors <= 8 * 512 * kPortableCluster)
    return forward_in_registers(vectors, 8, vectors <= 8192 ? 4 : 8);
  return {};
}

// Backward: blocks that stay for the whole launch.
enum class BackwardKernel {
  kRegisters,  // threads * vectors_per_thread vectors cover a row
  kRing,       // threads * vectors_per_thread * cluster do; Hopper, no fp64
  kLoop,       // a block reads each row twice
};

struct BackwardConfig {
  BackwardKernel kernel = BackwardKernel::kLoop;
  int threads = kMaxThreads;   // a row and block: a power of two up to 32, or a multiple of 32
  int vectors_per_thread = 0;  // 1, 2 or 4
  int rows_per_block = 1;      // kRegisters
  int blocks_per_sm = 1;       // kRegisters
  int teams = 1;               // kRing: groups of threads with rows and stages of their own
  int stages = 0;              // kRing: a team's
  int cluster = 1;             // kRing: blocks a row
};

constexpr int kRingThreads = 384;  // at most in a block
constexpr int kRingVectors = 4;    // a thread: fewer cost more instructions than they hide latency
constexpr int kMaxStages = 4;
constexpr int kMinStages = 3;  // backward_ring.cu
constexpr int kSumSlots = 4;   // a peer can be one iteration behind in reading and another ahead in writing

// A ring block's shared memory: barriers of 8 bytes, sums, stages. Offsets and sizes in bytes.
struct RingLayout {
  int sums, ring, stage_bytes, bytes;
  int h, dh;  // in a stage, behind dy
};

// vector_bytes and residual_vector_bytes: a vector of grad_out and of residual_out. Unaligned, a row takes
// the 16-byte blocks around it.
inline RingLayout ring_layout(const BackwardConfig& config, int64_t vectors, int vector_bytes,
                              int residual_vector_bytes, bool aligned) {
  constexpr int kLine = 128;
  const int warps = sum_layout(vectors, config.vectors_per_thread).warps;
  const auto row_bytes = [&](int of_a_vector) {
    return round_up(config.threads * config.vectors_per_thread * of_a_vector + (aligned ? 0 : 32), kLine);
  };
  RingLayout layout;
  layout.sums = 8 * config.teams * (kMaxStages + kSumSlots);
  layout.ring = round_up(layout.sums + 4 * config.teams * kSumSlots * warps, kLine);
  layout.h = row_bytes(vector_bytes);
  layout.dh = layout.h + row_bytes(residual_vector_bytes);
  layout.stage_bytes = layout.dh + row_bytes(residual_vector_bytes);
  layout.bytes = layout.ring + config.teams * config.stages * layout.stage_bytes;
  return layout;
}

inline int log2_of(int power) { return power <= 1 ? 0 : 1 + log2_of(power / 2); }

// Blocks of the launch: what is resident, and no more than there are rows.
inline int64_t backward_blocks(const BackwardConfig& config, int64_t rows, const Gpu& gpu) {
  if (config.kernel == BackwardKernel::kRing) {
    return std::min<int64_t>(rows, gpu.clusters[log2_of(config.cluster)]) * config.cluster;
  }
  return std::min<int64_t>(div_up(rows, config.rows_per_block), int64_t{gpu.sms} * config.blocks_per_sm);
}

// Rows of grad_weight's partial sums that the launch writes: one for each row that is worked on at a time.
inline int64_t partial_rows(const BackwardConfig& config, int64_t rows, const Gpu& gpu) {
  const int64_t blocks = backward_blocks(config, rows, gpu) / config.cluster;
  return blocks * (config.kernel == BackwardKernel::kRing ? config.teams : config.rows_per_block);
}

// Two rows of 128 threads, three stages each, are enough bytes on their way; more of them would only have to
// be worked off when there is nothing left to load. Nothing where a cluster's slice of a row does not fit.
inline BackwardConfig backward_ring_config(int64_t vectors, int64_t rows, int vector_bytes,
                                           int residual_vector_bytes, bool aligned, const Gpu& gpu) {
  BackwardConfig config;
  if (vectors <= 2 * kWarpThreads) return config;  // so short that registers hold enough rows
  for (config.cluster = 1; config.cluster <= kMaxCluster; config.cluster *= 2) {
    const int64_t slice = div_up(vectors, config.cluster), clusters = gpu.clusters[log2_of(config.cluster)];
    if (slice > 1024 || clusters == 0) continue;
    config.kernel = BackwardKernel::kRing;
    config.vectors_per_thread = kRingVectors;
    config.threads = threads_of_row(slice, config.vectors_per_thread);
    config.teams = std::max(1, (config.threads > 128 ? 320 : 256) / config.threads);
    config.teams =
        static_cast<int>(std::min<int64_t>(config.teams, div_up(rows, clusters)));  // none without a row
    config.stages = kMinStages;
    if (ring_layout(config, vectors, vector_bytes, residual_vector_bytes, aligned).bytes <= gpu.shared_bytes)
      return config;
  }
  return {};
}

// vector_bytes and residual_vector_bytes as in ring_layout.
inline BackwardConfig backward_config(int64_t vectors, int64_t rows, int vector_bytes,
                                      int residual_vector_bytes, bool aligned, bool ring, const Gpu& gpu) {
  if (ring) {
    const BackwardConfig config =
        backward_ring_config(vectors, rows, vector_bytes, residual_vector_bytes, aligned, gpu);
    if (config.kernel == BackwardKernel::kRing) return config;
  }
  BackwardConfig config;
  if (vectors > 4 * 256) return config;
  config.kernel = BackwardKernel::kRegisters;
  config.vectors_per_thread = vectors <= kWarpThreads ? 1 : vectors <= 2 * kWarpThreads ? 2 : 4;
  config.threads = threads_of_row(vectors, config.vectors_per_thread);
  config.rows_per_block = std::max(1, 128 / config.threads);
  config.blocks_per_sm = std::max(1, 512 / (config.threads * config.rows_per_block));
  return config;
}

}  // namespace fused::cuda
