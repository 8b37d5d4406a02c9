#include "emulation.h"

#include <cstdio>
#include <cstdlib>
#include <random>

thread_local uint3 threadIdx, blockIdx;
thread_local dim3 blockDim, gridDim;

namespace emulation {

thread_local Cluster* cluster;
thread_local Thread* current;

namespace {

constexpr int kStackBytes = 48 << 10;
constexpr int kIdleRounds = 1000;  // without progress: what is late or asleep may need some

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "emulation: %s\n", what);
  std::abort();
}

void run_thread() {
  (*cluster->kernel)();
  current->ended = true;
  cluster->progress = true;
  _longjmp(cluster->scheduler, 1);
}

void start(Thread& thread) {
  if (!thread.stack) thread.stack.reset(new char[kStackBytes]);
  getcontext(&thread.start);
  thread.start.uc_stack.ss_sp = thread.stack.get();
  thread.start.uc_stack.ss_size = kStackBytes;
  makecontext(&thread.start, run_thread, 0);
  thread.started = true;
  setcontext(&thread.start);
}

// Returns when the thread yields or ends.
void run(Thread& thread) {
  current = &thread;
  threadIdx = thread.index;
  blockIdx = thread.block->index;
  if (_setjmp(cluster->scheduler) != 0) return;
  thread.started ? _longjmp(thread.resume, 1) : start(thread);
}

void complete_some(std::vector<std::function<void()>>& late, std::mt19937& random) {
  for (size_t i = 0; i < late.size();) {
    if (random() % 2) {
      ++i;
      continue;
    }
    const auto complete = std::move(late[i]);
    late.erase(late.begin() + i);
    complete();
    cluster->progress = true;
  }
}

void run_all(std::vector<Thread>& threads, std::mt19937& random) {
  size_t ended = 0;
  for (int idle = 0; ended < threads.size();) {
    cluster->progress = false;
    complete_some(cluster->late, random);
    ended = 0;
    for (Thread& thread : threads) {
      int& asleep = thread.warp->asleep;
      if (thread.lane == 0) asleep = asleep > 0 ? asleep - 1 : random() % 1024 == 0 ? random() % 64 : 0;
      if (!thread.ended && asleep == 0) run(thread);
      ended += thread.ended;
    }
    idle = cluster->progress ? 0 : idle + 1;
    if (idle > kIdleRounds) fail("threads wait for each other in vain");
  }
  if (!cluster->late.empty()) fail("a block ended before copies and stores into its shared memory");
}

}  // namespace

void yield() {
  if (_setjmp(current->resume) == 0) _longjmp(cluster->scheduler, 1);
}

void launch(dim3 grid, dim3 block, size_t shared_bytes, int blocks_per_cluster,
            const std::function<void()>& kernel) {
  static thread_local std::mt19937 random(1);
  static thread_local std::vector<Thread> threads;
  if (grid.x % blocks_per_cluster != 0) fail("a grid is not a whole number of clusters");
  if (shared_bytes > kSharedBytes) fail("a block wants more shared memory than there is");
  gridDim = grid;
  blockDim = block;
  const int per_block = block.x * block.y * block.z;
  threads.resize(blocks_per_cluster * per_block);
  for (unsigned first = 0; first < grid.x; first += blocks_per_cluster) {
    Cluster here = {};
    cluster = &here;
    here.kernel = &kernel;
    here.threads = blocks_per_cluster * per_block;
    here.blocks.resize(blocks_per_cluster);
    for (int rank = 0; rank < blocks_per_cluster; ++rank) {
      Block& of = here.blocks[rank];
      of.index = {first + rank, 0, 0};
      of.rank = rank;
      of.memory.assign(shared_bytes + kSharedAlignment, 0xff);  // NaNs: nothing is cleared on a GPU either
      of.warps.resize((per_block + kWarp - 1) / kWarp);
      for (unsigned i = 0; i < static_cast<unsigned>(per_block); ++i) {
        Thread& thread = threads[rank * per_block + i];
        thread.index = {i % block.x, i / block.x, 0};
        thread.block = &of;
        thread.warp = &of.warps[i / kWarp];
        thread.lane = i % kWarp;
        thread.started = thread.ended = false;
      }
    }
    run_all(threads, random);
  }
  cluster = nullptr;
}

}  // namespace emulation
