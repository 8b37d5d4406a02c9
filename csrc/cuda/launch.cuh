// The one way a kernel is launched.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <mutex>

#include "cuda/config.h"

namespace fused::cuda {

constexpr int kMaxDevices = 64;
constexpr int kDefaultSharedBytes = 48 * 1024;

struct Launch {
  int64_t blocks;
  dim3 threads;
  int cluster = 1;
  int shared_bytes = 0;
  bool dependent = false;  // may start before the kernel ahead of it in the stream has ended (sm_90)
  int device;
  cudaStream_t stream;
};

template <auto* kernel, class... Arguments>
cudaError_t launch(const Launch& how, const Arguments&... arguments) {
  if (how.shared_bytes > kDefaultSharedBytes) {
    static std::atomic<int> granted[kMaxDevices];  // asked for once: the call costs as much as a launch
    static std::mutex granting;                    // the smaller of two threads' requests must not come last
    std::atomic<int>& bytes = granted[how.device % kMaxDevices];
    if (bytes.load(std::memory_order_acquire) < how.shared_bytes) {
      const std::lock_guard<std::mutex> lock(granting);
      if (bytes.load(std::memory_order_relaxed) < how.shared_bytes) {
        const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, how.shared_bytes);
        if (error != cudaSuccess) return error;
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed,
                             1);  // refused, harmlessly, before sm_90
        bytes.store(how.shared_bytes, std::memory_order_release);
      }
    }
  }
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(how.blocks));
  config.blockDim = how.threads;
  config.dynamicSmemBytes = how.shared_bytes;
  config.stream = how.stream;
  config.attrs = attributes;
  if (how.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {static_cast<unsigned>(how.cluster), 1, 1};
    ++config.numAttrs;
  }
  if (how.dependent) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
    ++config.numAttrs;
  }
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace fused::cuda
