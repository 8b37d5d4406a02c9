// The kernels' launchers, for the host side and the benchmarks.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/config.h"
#include "params.h"

namespace fused::cuda {

// Where a kernel runs.
struct Queue {
  const Gpu& gpu;
  int device;
  cudaStream_t stream;
};

// The kernels in registers or the one that reads a row twice. aligned, here and below: every row of every
// tensor starts on 16 bytes and holds a whole number of vectors.
cudaError_t launch_forward(const ForwardParams& params, const ForwardConfig& config, bool aligned,
                           const Queue& queue);
cudaError_t launch_forward_shared(const ForwardParams& params, const ForwardConfig& config, bool aligned,
                                  const Queue& queue);

// The kernel in registers or the one that reads a row twice. grad_weight_partials: sums in the
// accumulation type, [partial_rows(config, rows, gpu), cols]; null where no grad_weight is asked for, or no
// partial rows.
cudaError_t launch_backward(const BackwardParams& params, const BackwardConfig& config,
                            void* grad_weight_partials, bool aligned, const Queue& queue);
cudaError_t launch_backward_ring(const BackwardParams& params, const BackwardConfig& config,
                                 void* grad_weight_partials, bool aligned, const Queue& queue);

// Adds the partials up in a fixed order and casts.
cudaError_t launch_finish_grad_weight(const BackwardParams& params, const void* partials,
                                      int64_t partial_rows, const Queue& queue);

// The virtual architecture (90 for compute_90) that the kernels' code for the current device was compiled
// for.
cudaError_t kernel_target(int* target);

// How many clusters of blocks that fill an SM's shared memory are resident at a time: fewer than the SMs
// would hold, since a cluster stays within a group of SMs.
cudaError_t resident_clusters(int cluster, int shared_bytes, int* count);

}  // namespace fused::cuda
