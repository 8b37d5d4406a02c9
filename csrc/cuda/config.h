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
  int clusters[5];   // resident at a time, of 1, 2, 4, 8 and 16 blocks that fill an SM; none larger than 1
                     // before Hopper
};

constexpr int kWarpThreads = 32;
constexpr int kMaxThreads = 1024;
constexpr int kPortableCluster = 8;  // the largest that needs no permission
constexpr int kMaxCluster = 16;
constexpr int kLineBytes = 128;

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
  int warps;   // of a row, of all its blocks; those without vectors take part, so that none falls behind
  int octets;  // of chunks
  int lanes;   // octets, at most 32, rounded up to a power of two
  int slots;   // for the warps' sums: whole octets
};

// `threads`: of a row, of all its blocks.
inline SumLayout sum_layout(int64_t vectors, int vectors_per_thread, int threads) {
  constexpr int kOctetVectors = 8 * kWarpThreads;
  SumLayout layout;
  layout.warps = static_cast<int>(div_up(threads, kWarpThreads));
  layout.octets = static_cast<int>(div_up(vectors, kOctetVectors));
  layout.lanes = next_power_of_two(std::min(layout.octets, kWarpThreads));
  layout.slots = round_up(layout.warps * vectors_per_thread, 8) / vectors_per_thread;
  return layout;
}

// A row as the configurations see it.
struct RowShape {
  int64_t vectors;     // 16 bytes of input each
  int elements;        // of a vector
  int out_bytes;       // of a vector's elements in out and its gradient
  int residual_bytes;  // of a vector's elements in residual, residual_out and their gradients
};

// Item sizes in bytes.
inline RowShape row_shape(int64_t cols, int input_item, int out_item, int residual_item) {
  const int elements = 16 / input_item;
  return {div_up(cols, elements), elements, elements * out_item, elements * residual_item};
}

inline int log2_of(int power) { return power <= 1 ? 0 : 1 + log2_of(power / 2); }

// The largest cluster of up to `most` blocks that the GPU schedules.
inline int largest_cluster(const Gpu& gpu, int most) {
  while (most > 1 && gpu.clusters[log2_of(most)] == 0) most /= 2;
  return most;
}

// Forward.
enum class ForwardKernel {
  kRegisters,  // threads * vectors_per_thread * cluster vectors cover a row
  kShared,     // the same, by way of shared memory
  kLoop,       // a block reads each row twice
};

struct ForwardConfig {
  ForwardKernel kernel = ForwardKernel::kLoop;
  int threads = kMaxThreads;   // a row and block: a power of two up to 32, or a multiple of 32
  int vectors_per_thread = 0;  // 1, 2, 4 or 8 in registers, else kSharedVectors
  int rows_per_block = 1;      // kRegisters
  int cluster = 1;             // blocks a row (Hopper)
};

// A block's threads at most, of kRegisters, by vectors a thread.
constexpr int forward_threads(int vectors) { return vectors >= 4 ? 256 : kMaxThreads; }

constexpr int kSharedThreads = 512;  // at most in a block
constexpr int kSharedVectors = 4;    // a thread

inline ForwardConfig forward_in_registers(int64_t vectors, int vectors_per_thread, int cluster = 1) {
  return {ForwardKernel::kRegisters, threads_of_row(div_up(vectors, cluster), vectors_per_thread),
          vectors_per_thread, 1, cluster};
}

inline ForwardConfig forward_through_shared(int64_t vectors, int cluster = 1) {
  return {ForwardKernel::kShared, threads_of_row(div_up(vectors, cluster), kSharedVectors), kSharedVectors, 1,
          cluster};
}

// The shared memory of a block that holds its part of a row: barriers, sums, the slices of input and
// residual. Offsets and sizes in bytes.
struct SliceLayout {
  static constexpr int kSums =
      8 * (kSharedThreads / kWarpThreads + 2);  // behind a barrier a warp and another
  int input, residual, bytes;
};

// accumulate_bytes: an element of the sums. vector_bytes and residual_vector_bytes: a vector of input and of
// residual.
inline SliceLayout slice_layout(const ForwardConfig& config, int64_t vectors, int accumulate_bytes,
                                int vector_bytes, int residual_vector_bytes) {
  const SumLayout sums = sum_layout(vectors, config.vectors_per_thread, config.threads * config.cluster);
  // A slice starts anywhere in a line, and is read a vector beyond its ends.
  const auto room = [&](int of_a_vector) {
    return round_up((config.threads * config.vectors_per_thread + 2) * of_a_vector, kLineBytes) +
           2 * kLineBytes;
  };
  SliceLayout layout;
  layout.input = round_up(SliceLayout::kSums + accumulate_bytes * sums.slots, kLineBytes) + kLineBytes;
  layout.residual = layout.input + room(vector_bytes);
  layout.bytes = layout.residual + room(residual_vector_bytes);
  return layout;
}

// Blocks of the launch.
inline int64_t forward_blocks(const ForwardConfig& config, int64_t rows) {
  return div_up(rows, config.rows_per_block) * config.cluster;
}

// `aligned`: as in launch_forward.
inline ForwardConfig forward_config(const RowShape& row, int64_t rows, bool aligned, const Gpu& gpu) {
  const int64_t vectors = row.vectors;
  if (vectors <= kWarpThreads) {  // several rows a warp
    ForwardConfig config = forward_in_registers(vectors, 1);
    config.rows_per_block = 256 / config.threads;
    return config;
  }
  const int v = aligned ? 2 : 1;  // a vector that does not start on 16 bytes takes twice the registers
  const int widest = largest_cluster(gpu, kPortableCluster);
  // Few rows: latency counts, and every row is spread over threads and, where they would idle, over SMs.
  if (rows <= 16 && vectors >= 512 && vectors <= int64_t{widest} * kMaxThreads * v) {
    return forward_in_registers(vectors, vectors <= 1024 ? 1 : v,
                                vectors < 1024 ? std::min(4, widest) : widest);
  }
  if (rows <= 2 * gpu.sms && vectors <= 1024) {
    if (vectors == 1024 && rows <= gpu.sms) return forward_in_registers(vectors, 1, std::min(2, widest));
    return forward_in_registers(vectors, vectors <= 512 && rows <= gpu.sms / 2 ? 1 : v);
  }
  if (widest > 1 && rows <= 2 * gpu.sms && vectors <= int64_t{rows <= gpu.sms / 2 ? 2 : 1} * kMaxThreads * v)
    return forward_in_registers(vectors, v, 2);
  // Long rows: blocks of 256 threads with 4 vectors each, in clusters as large as that takes; of 128 threads
  // where the launch is a few waves, which then ends sooner. Where the largest cluster does not hold a row of
  // fp32 or fp64, 8 vectors a thread do. Beside a 16-bit input an fp32 residual takes more registers: its
  // longest rows have 2 vectors a thread, in blocks of up to 1024.
  const bool few_waves = rows * vectors <= int64_t{16384} * gpu.sms;
  const bool in_clusters = vectors >= 1024 && widest > 1;
  if (aligned && (vectors > 1024 ? in_clusters : few_waves && (vectors == 512 || in_clusters))) {
    const int64_t blocks = div_up(vectors, few_waves ? 512 : 1024);
    const int cluster = std::min(next_power_of_two(blocks), largest_cluster(gpu, kMaxCluster));
    ForwardConfig config = forward_in_registers(vectors, 4, cluster);
    if (row.residual_bytes > 16 && vectors > 8192) config = forward_in_registers(vectors, 2, widest);
    if (row.elements <= 4 && config.threads > forward_threads(4))
      config = forward_in_registers(vectors, 8, cluster);
    if (config.threads <= forward_threads(config.vectors_per_thread)) return config;
  }
  if (aligned && vectors <= 1024) {
    ForwardConfig config = forward_in_registers(vectors, 2);
    const bool many = rows >= 64 * gpu.sms;
    config.rows_per_block = config.threads == 32 || (config.threads == 256 && many) ? 2 : 1;
    return config;
  }
  for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2) {
    const int64_t slice = div_up(vectors, cluster);
    if (slice > int64_t{kSharedThreads} * kSharedVectors || gpu.clusters[log2_of(cluster)] == 0) continue;
    // Smaller slices where a row takes several blocks or SMs would idle.
    const bool split = cluster > 1 && slice > 1024, idle_sms = 2 * cluster * rows <= gpu.sms;
    if ((split || idle_sms) && cluster < widest) continue;
    const ForwardConfig config = forward_through_shared(vectors, cluster);
    if (slice_layout(config, vectors, 8, 16, row.residual_bytes).bytes <= gpu.shared_bytes) return config;
  }
  if (vectors <= int64_t{kMaxThreads} * v) return forward_in_registers(vectors, v);
  return {};
}

// Workers that stay for the whole launch: no more than are resident, and as few as take no more turns than
// those would.
inline int64_t workers(int64_t tasks, int64_t resident) { return div_up(tasks, div_up(tasks, resident)); }

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
  bool columns_apart = false;  // kRegisters: grad_weight by blocks of its own, without partial sums
  int teams = 1;               // kRing: groups of threads with rows and stages of their own
  int stages = 0;              // kRing: a team's
  int cluster = 1;             // kRing: blocks a row
};

// A block's threads at most, of kRegisters, by vectors a thread.
constexpr int backward_threads(int vectors) { return vectors == 4 ? 256 : 512; }

// A ring's threads in a block, at most, and vectors a thread: unaligned, a run's shifts and ends cost less in
// a longer one, as far as the registers hold it.
constexpr int ring_threads(bool aligned) { return aligned ? 512 : 384; }
constexpr int ring_vectors(bool aligned, int residual_bytes) {
  return aligned || residual_bytes > 16 ? 2 : 4;
}

constexpr int kMaxStages = 4;

// Iterations from a row's sum until its stage has been read (backward_ring.cu); two more are on their way.
constexpr int stage_lag(bool aligned) { return aligned ? 0 : 1; }
constexpr int min_stages(bool aligned) { return 2 + stage_lag(aligned); }
constexpr int kSumSlots = 4;  // of which two are in use: one is read, the next one written

// A ring block's shared memory: barriers of 8 bytes, sums, stages. Offsets and sizes in bytes.
struct RingLayout {
  int sums, ring, stage_bytes, bytes;
  int h, dh;  // in a stage, behind dy
};

// Unaligned, a row takes the 16-byte blocks around it, starts up to 112 bytes behind a line, and is read for
// a block beyond its end.
inline RingLayout ring_layout(const BackwardConfig& config, const RowShape& row, bool aligned) {
  const int slots = sum_layout(row.vectors, config.vectors_per_thread, config.threads * config.cluster).slots;
  const auto row_bytes = [&](int of_a_vector) {
    return round_up(config.threads * config.vectors_per_thread * of_a_vector + (aligned ? 0 : kLineBytes),
                    kLineBytes);
  };
  RingLayout layout;
  layout.sums = round_up(8 * config.teams * (kMaxStages + kSumSlots), 16);
  layout.ring = round_up(layout.sums + 4 * config.teams * kSumSlots * slots, kLineBytes);
  layout.h = row_bytes(row.out_bytes);
  layout.dh = layout.h + row_bytes(row.residual_bytes);
  layout.stage_bytes = layout.dh + row_bytes(row.residual_bytes);
  layout.bytes = layout.ring + config.teams * config.stages * layout.stage_bytes;
  return layout;
}

// Blocks that rows are dealt out to.
inline int64_t backward_blocks(const BackwardConfig& config, int64_t rows, const Gpu& gpu) {
  if (config.kernel == BackwardKernel::kRing) {
    return workers(div_up(rows, config.teams), gpu.clusters[log2_of(config.cluster)]) * config.cluster;
  }
  return workers(div_up(rows, config.rows_per_block), int64_t{gpu.sms} * config.blocks_per_sm);
}

// Rows of grad_weight's partial sums that the launch writes. None where a block, or a cluster, has all the
// rows of its columns and writes grad_weight itself.
inline int64_t partial_rows(const BackwardConfig& config, int64_t rows, const Gpu& gpu) {
  if (config.columns_apart) return 0;
  const int64_t parts = backward_blocks(config, rows, gpu) / config.cluster;
  return parts == 1 && config.kernel != BackwardKernel::kLoop ? 0 : parts;
}

// Twelve warps with two vectors a thread have enough bytes on their way and work them off as they come; with
// more, the memory is slower, and more is left to do when the last ones have come. Beside a 16-bit input, an
// fp32 residual's rows keep six warps busy, of two teams or three. Short rows of an fp32 residual, whatever
// the input, take three teams. A larger cluster where a block would have more or fewer, as far as there is
// one; nothing where a row does not fit. Unaligned rows take more registers, and leave ten warps.
inline BackwardConfig backward_ring_config(const RowShape& row, int64_t rows, bool aligned, const Gpu& gpu) {
  const bool mixed = row.residual_bytes > 16, wide = row.residual_bytes == 4 * row.elements;
  const bool is_short = row.vectors * row.elements <= 4096;
  const int enough_threads = !aligned ? 320 : mixed ? 192 : 384;
  const int most_threads = !aligned ? ring_threads(aligned) : mixed ? 320 : 480;
  const int fewest_teams = !aligned || !wide ? 1 : is_short ? 3 : mixed ? 2 : 1;
  const int enough_bytes = aligned ? std::min(gpu.shared_bytes, 112 * 1024) : gpu.shared_bytes;
  const int largest = largest_cluster(gpu, kMaxCluster);
  for (int cluster = 1; cluster <= largest; cluster *= 2) {
    BackwardConfig config;
    config.kernel = BackwardKernel::kRing;
    config.vectors_per_thread = ring_vectors(aligned, row.residual_bytes);
    config.stages = min_stages(aligned);
    config.cluster = cluster;
    config.threads = threads_of_row(div_up(row.vectors, cluster), config.vectors_per_thread);
    const auto fits = [&](int bytes) { return ring_layout(config, row, aligned).bytes <= bytes; };
    const int64_t clusters = gpu.clusters[log2_of(cluster)];
    if (config.threads > ring_threads(aligned) || clusters == 0 || !fits(gpu.shared_bytes)) continue;
    const int enough = std::max(fewest_teams, static_cast<int>(div_up(enough_threads, config.threads)));
    if (enough > 1 && enough * config.threads > most_threads && cluster < largest) continue;
    const int most = std::min(enough, ring_threads(aligned) / config.threads);
    config.teams = static_cast<int>(std::min<int64_t>(most, div_up(rows, clusters)));  // none without a row
    while (config.teams > 1 && !fits(enough_bytes)) --config.teams;
    // Too few warps for unaligned mixed rows, where a stage is large.
    if (!aligned && cluster == 1 && config.teams < enough && config.teams * config.threads < 256) continue;
    if (aligned) {  // one more stage where there is room
      ++config.stages;
      if (!fits(enough_bytes)) --config.stages;
    }
    return config;
  }
  return {};
}

inline BackwardConfig backward_config(const RowShape& row, int64_t rows, bool aligned, bool ring,
                                      const Gpu& gpu) {
  const int64_t vectors = row.vectors;
  // The registers hold enough of short rows, and few rows are done before a ring has started.
  const bool few = rows <= gpu.sms, some = rows <= 4 * gpu.sms;
  if (ring && vectors > kWarpThreads && !(some && vectors <= 1024)) {
    const BackwardConfig config = backward_ring_config(row, rows, aligned, gpu);
    if (config.kernel == BackwardKernel::kRing) return config;
  }
  BackwardConfig config;
  if (vectors > 1024) return config;
  config.kernel = BackwardKernel::kRegisters;
  config.columns_apart = few;
  const int threads = few ? 512 : kWarpThreads;  // more where latency counts
  config.vectors_per_thread = vectors <= threads ? 1 : vectors <= 2 * threads ? 2 : 4;
  config.threads = threads_of_row(vectors, config.vectors_per_thread);
  config.rows_per_block = std::max(1, (some ? 256 : 128) / config.threads);
  config.blocks_per_sm = std::max(1, (some ? 256 : 512) / (config.threads * config.rows_per_block));
  return config;
}

}  // namespace fused::cuda
