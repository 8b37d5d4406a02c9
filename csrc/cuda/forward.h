// The forward kernels' launcher, for the host side and the benchmarks.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/config.h"
#include "params.h"

namespace fused::cuda {

// aligned: every row of every tensor starts on 16 bytes and holds a whole number of vectors.
cudaError_t launch_forward(const ForwardParams& params, const ForwardConfig& config, bool aligned,
                           const Gpu& gpu, int device, cudaStream_t stream);

// The virtual architecture (90 for compute_90) that the kernels' code for the current device was compiled
// for.
cudaError_t kernel_target(int* target);

}  // namespace fused::cuda
