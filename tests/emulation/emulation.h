// CUDA on the CPU: what the kernels use of CUDA C++ and of the runtime, and no more. A thread of a block is a
// fiber; the blocks of a cluster run side by side, clusters one after another. Warps fall behind each other
// at random, and copies and stores that are asynchronous on a GPU come late, in random order. Threads that
// wait for each other in vain abort the program. Not emulated: speed, memory order, a grid that overlaps the
// one before.
#pragma once

#include <driver_types.h>  // of the CUDA toolkit, like the next two
#include <setjmp.h>
#include <ucontext.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#undef __device__
#undef __forceinline__
#undef __global__
#undef __grid_constant__
#undef __launch_bounds__
#undef __maxnreg__
#undef __shared__
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)
// One block of a host thread runs at a time; blocks of a cluster have dynamic shared memory alone.
#define __shared__ static thread_local

extern thread_local uint3 threadIdx, blockIdx;  // of the thread that runs
extern thread_local dim3 blockDim, gridDim;

namespace emulation {

constexpr int kWarp = 32;
constexpr int kTarget = FUSED_EMULATED_TARGET;  // 90, or 75 for the code of GPUs before it
constexpr int kSms = kTarget >= 90 ? 4 : 24;    // few: persistent blocks have several rows each
constexpr int kSharedBytes = kTarget >= 90 ? 227 << 10 : 64 << 10;
constexpr int kSharedAlignment = 128;

struct Barrier {
  int arrived = 0;
  int64_t generation = 0;
};

struct Warp : Barrier {
  uint64_t values[2][kWarp];  // what the lanes give each other, in turn: one may be a shuffle ahead
  int asleep = 0;             // rounds that it sits out
};

struct Block {
  uint3 index;
  int rank;  // in the cluster
  std::vector<unsigned char> memory;
  Barrier barriers[16];
  std::vector<Warp> warps;

  unsigned char* shared() {
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + (kSharedAlignment - address % kSharedAlignment) % kSharedAlignment;
  }
};

struct Thread {
  ucontext_t start;
  jmp_buf resume;  // once started: swapcontext would call the kernel
  std::unique_ptr<char[]> stack;
  uint3 index;
  Block* block;
  Warp* warp;
  int lane;
  int64_t cluster_generation;
  bool started, ended;
};

struct Cluster {
  std::vector<Block> blocks;
  int threads;
  Barrier barrier;
  std::vector<std::function<void()>> late;  // asynchronous copies and stores under way
  const std::function<void()>* kernel;
  jmp_buf scheduler;
  bool progress;
};

extern thread_local Cluster* cluster;
extern thread_local Thread* current;

// Lets the other threads run.
void yield();

void launch(dim3 grid, dim3 block, size_t shared_bytes, int blocks_per_cluster,
            const std::function<void()>& kernel);

template <class Condition>
void wait_until(Condition condition) {
  while (!condition()) yield();
  cluster->progress = true;
}

// Returns the generation that ends when all have arrived.
inline int64_t arrive(Barrier& barrier, int expected) {
  const int64_t generation = barrier.generation;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  cluster->progress = true;
  return generation;
}

inline void meet(Barrier& barrier, int expected) {
  const int64_t generation = arrive(barrier, expected);
  wait_until([&] { return barrier.generation > generation; });
}

template <class T>
T shuffle(T value, int source) {
  Warp& warp = *current->warp;
  auto& values = warp.values[warp.generation % 2];
  std::memcpy(&values[current->lane], &value, sizeof(T));
  meet(warp, kWarp);
  T result;
  std::memcpy(&result, &values[source], sizeof(T));
  return result;
}

template <class To, class From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace emulation

// --- Device ----------------------------------------------------------------

using std::fma;
using std::max;
using std::min;

inline void __syncthreads() {
  emulation::meet(emulation::current->block->barriers[0], blockDim.x * blockDim.y * blockDim.z);
}
inline void __syncwarp() { emulation::meet(*emulation::current->warp, emulation::kWarp); }

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulation::shuffle(value, lane);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int distance) {
  return emulation::shuffle(value, emulation::current->lane ^ distance);
}

inline uint32_t __float_as_uint(float x) { return emulation::same_bits<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return emulation::same_bits<float>(x); }
inline double __hiloint2double(uint32_t high, uint32_t low) {
  return emulation::same_bits<double>(static_cast<uint64_t>(high) << 32 | low);
}
inline int __double2loint(double x) { return static_cast<int>(emulation::same_bits<uint64_t>(x)); }
inline int __double2hiint(double x) { return static_cast<int>(emulation::same_bits<uint64_t>(x) >> 32); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> shift % 32);
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float rsqrt(float x) { return static_cast<float>(1 / std::sqrt(static_cast<double>(x))); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }

// --- Host ------------------------------------------------------------------

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  int cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      cluster = config->attrs[i].val.clusterDim.x;
  }
  emulation::launch(config->gridDim, config->blockDim, config->dynamicSmemBytes, cluster,
                    [&] { kernel(arguments...); });
  return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
  attributes->ptxVersion = emulation::kTarget;
  return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* count, Kernel*, const cudaLaunchConfig_t* config) {
  *count = std::max(1, emulation::kSms / static_cast<int>(config->gridDim.x));
  return cudaSuccess;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
