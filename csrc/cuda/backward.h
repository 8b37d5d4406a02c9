// The backward kernels' launchers, for the host side and the benchmarks.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/config.h"
#include "params.h"

namespace fused::cuda {

// grad_weight_partials: config's blocks' sums in the accumulation type, [partial_rows(config, rows, gpu),
// cols]; null where no grad_weight is asked for. aligned: as in launch_forward.
cudaError_t launch_backward(const BackwardParams& params, const BackwardConfig& config,
                            void* grad_weight_partials, bool aligned, const Gpu& gpu, int device,
                            cudaStream_t stream);
cudaError_t launch_backward_ring(const BackwardParams& params, const BackwardConfig& config,
                                 void* grad_weight_partials, bool aligned, const Gpu& gpu, int device,
                                 cudaStream_t stream);

// How many clusters of blocks that fill an SM's shared memory are resident at a time: fewer than the SMs
// would hold, since a cluster stays within a group of SMs.
cudaError_t resident_clusters(int cluster, int shared_bytes, int* count);

// Adds the partials up in a fixed order and casts.
cudaError_t launch_finish_grad_weight(const BackwardParams& params, const void* partials,
                                      int64_t partial_rows, const Gpu& gpu, int device, cudaStream_t stream);

}  // namespace fused::cuda
