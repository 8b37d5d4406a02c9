// All that is not plain CUDA C++, in one place, of which tests/emulation has a twin: hints to the compiler,
// barriers of a part of a block, and the PTX instructions of sm_90: dependent launch, transaction barriers,
// bulk copies into shared memory, and stores into the shared memory of a cluster's other blocks. In code for
// older GPUs these are empty: the kernels copy without bulk copies there, and the host asks for no clusters.
#pragma once

#include <cstdint>

#include "cuda/vectors.cuh"

// Declares a block's dynamic shared memory.
#define FUSED_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

namespace fused::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FUSED_HOPPER 1
#else
#define FUSED_HOPPER 0
#endif

// The compiler would rather unpack again in every iteration of a loop than hold the values.
template <int N>
__device__ __forceinline__ void keep_in_registers(float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(values[i]));
}

// The next kernel in the stream may be launched from here on; what it reads of ours it waits for itself.
__device__ __forceinline__ void launch_dependents() {
#if FUSED_HOPPER
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns when everything the kernel before wrote can be read. Nothing may be read or written before it, the
// weight included: an optimiser step may have just written it.
__device__ __forceinline__ void wait_for_predecessor() {
#if FUSED_HOPPER
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Has these pointers computed, and the kernel's parameters read, while the kernel before still runs.
template <class... Pointers>
__device__ __forceinline__ void finish_before_waiting(Pointers*&... pointers) {
  (..., [&] {
    asm volatile("" : "+l"(pointers));
    __builtin_assume(__isGlobal(pointers));
  }());
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank = 0;
#if FUSED_HOPPER
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}

// Meant for barriers' initialisation alone, which fence_init has published: the block's other stores are not.
__device__ __forceinline__ void cluster_arrive() {
#if FUSED_HOPPER
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if FUSED_HOPPER
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// A transaction barrier in shared memory: a phase ends when its one arrival has come and as many bytes as
// that arrival expects.
struct TransactionBarrier {
  uint64_t state;

  __device__ __forceinline__ void init() {
#if FUSED_HOPPER
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&state)) : "memory");
#endif
  }

  // After init by one thread, before anyone else's copy or store may signal it.
  static __device__ __forceinline__ void fence_init() {
#if FUSED_HOPPER
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

  __device__ __forceinline__ void arrive_expecting(uint32_t bytes) {
#if FUSED_HOPPER
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&state)), "r"(bytes)
                 : "memory");
#endif
  }

  // Raises what the phase expects, by a thread that does not arrive.
  __device__ __forceinline__ void expect(uint32_t bytes) {
#if FUSED_HOPPER
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state)),
                 "r"(bytes)
                 : "memory");
#endif
  }

  // For this block's copies.
  __device__ __forceinline__ void wait(uint32_t phase) {
#if FUSED_HOPPER
    uint32_t done = 0;
    while (!done) {
      asm volatile(
          "{\n.reg .pred done;\n"
          "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%1], %2;\n"
          "selp.u32 %0, 1, 0, done;\n}"
          : "=r"(done)
          : "r"(shared_address(&state)), "r"(phase & 1)
          : "memory");
    }
#endif
  }

  // For stores of the cluster's other blocks; this one empties the L1 cache.
  __device__ __forceinline__ void wait_for_peers(uint32_t phase) {
#if FUSED_HOPPER
    uint32_t done = 0;
    while (!done) {
      asm volatile(
          "{\n.reg .pred done;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
          "selp.u32 %0, 1, 0, done;\n}"
          : "=r"(done)
          : "r"(shared_address(&state)), "r"(phase & 1)
          : "memory");
    }
#endif
  }
};

// Orders this thread's own stores to shared memory before bulk copies to the same place.
__device__ __forceinline__ void fence_bulk_copies() {
#if FUSED_HOPPER
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Copies `bytes` (a multiple of 16, both ends on 16 bytes) into this block's shared memory and signals the
// barrier.
__device__ __forceinline__ void bulk_copy(void* to, const void* from, uint32_t bytes,
                                          TransactionBarrier& barrier) {
#if FUSED_HOPPER
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
#endif
}

// Stores a value where block `rank` of the cluster has `to`, and signals that block's `barrier`.
template <class A>
__device__ __forceinline__ void store_in_peer(A* to, A value, TransactionBarrier& barrier, int rank) {
#if FUSED_HOPPER
  uint32_t peer_to, peer_barrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer_to) : "r"(shared_address(to)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer_barrier) : "r"(shared_address(&barrier)), "r"(rank));
  if constexpr (sizeof(A) == 8) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(peer_to),
        "l"(__double_as_longlong(value)), "r"(peer_barrier)
        : "memory");
  } else {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(peer_to),
        "r"(__float_as_uint(value)), "r"(peer_barrier)
        : "memory");
  }
#endif
}

// A barrier of `threads` threads (whole warps) of the block; teams with different ids do not meet.
__device__ __forceinline__ void team_barrier(int team, int threads) {
  if (threads == kWarp) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(threads) : "memory");
  }
}

}  // namespace fused::cuda
