// The twin of csrc/cuda/assembly.cuh, which it stands before on the include path.
#pragma once

#include <cstdlib>

#include "cuda/vectors.cuh"
#include "emulation.h"

#define FUSED_HOPPER (FUSED_EMULATED_TARGET >= 90)
#define FUSED_DYNAMIC_SHARED(name) unsigned char* const name = emulation::current->block->shared()

namespace fused::cuda {

template <int N>
void keep_in_registers(float (&)[N]) {}

inline void launch_dependents() {}
inline void wait_for_predecessor() {}

template <class... Pointers>
void finish_before_waiting(Pointers*&...) {}

inline int cluster_rank() { return emulation::current->block->rank; }

inline void cluster_arrive() {
  auto& cluster = *emulation::cluster;
  emulation::current->cluster_generation = emulation::arrive(cluster.barrier, cluster.threads);
}

inline void cluster_wait() {
  emulation::wait_until(
      [] { return emulation::cluster->barrier.generation > emulation::current->cluster_generation; });
}

struct TransactionBarrier {
  int32_t bytes;  // that are still expected; below zero when they come before the arrival
  int16_t arrivals;
  uint16_t phase;

  void init() { *this = {0, 1, 0}; }
  static void fence_init() {}

  void signal(int32_t more_bytes, int arrived) {
    if (!FUSED_HOPPER) return;
    bytes += more_bytes;
    arrivals -= arrived;
    if (arrivals < 0) std::abort();  // a second one in a phase
    if (bytes == 0 && arrivals == 0) {
      arrivals = 1;
      ++phase;
    }
  }

  void arrive_expecting(uint32_t more_bytes) { signal(more_bytes, 1); }
  void expect(uint32_t more_bytes) { signal(more_bytes, 0); }
  void wait_for_peers(uint32_t parity) { wait(parity); }
  void wait(uint32_t parity) {
    emulation::wait_until([&] { return !FUSED_HOPPER || phase % 2u != parity % 2; });
  }
};
static_assert(sizeof(TransactionBarrier) == 8);

inline void fence_bulk_copies() {}

inline void bulk_copy(void* to, const void* from, uint32_t bytes, TransactionBarrier& barrier) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16) std::abort();
  emulation::cluster->late.push_back([=, &barrier] {
    std::memcpy(to, from, bytes);
    barrier.signal(-static_cast<int32_t>(bytes), 0);
  });
}

template <class A>
void store_in_peer(A* to, A value, TransactionBarrier& barrier, int rank) {
  const auto in_peer = [&](void* own) {
    return emulation::cluster->blocks[rank].shared() +
           (static_cast<unsigned char*>(own) - emulation::current->block->shared());
  };
  auto* peer_to = reinterpret_cast<A*>(in_peer(to));
  auto* peer_barrier = reinterpret_cast<TransactionBarrier*>(in_peer(&barrier));
  emulation::cluster->late.push_back([=] {
    *peer_to = value;
    peer_barrier->signal(-static_cast<int32_t>(sizeof(A)), 0);
  });
}

inline void team_barrier(int team, int threads) {
  threads == kWarp ? __syncwarp() : emulation::meet(emulation::current->block->barriers[team + 1], threads);
}

}  // namespace fused::cuda
