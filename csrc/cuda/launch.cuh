// The one way a kernel is chosen by dtypes and launched.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "cuda/kernels.h"
#include "cuda/vectors.cuh"
#include "dispatch.h"

namespace fused::cuda {

constexpr int kMaxDevices = 64;
constexpr int kDefaultSharedBytes = 48 * 1024;

struct Launch {
  int64_t blocks;
  dim3 threads;
  int cluster = 1;
  int shared_bytes = 0;
};

template <auto* kernel, class... Arguments>
cudaError_t launch(const Launch& how, const Queue& queue, const Arguments&... arguments) {
  // Beyond 48 KiB, or 8 blocks a cluster, a kernel needs permission, which is asked for by the bytes.
  const int wanted = std::max(how.shared_bytes, how.cluster > kPortableCluster ? kDefaultSharedBytes + 1 : 0);
  if (wanted > kDefaultSharedBytes) {
    static std::atomic<int> granted[kMaxDevices];  // asked for once: the call costs as much as a launch
    static std::mutex granting;                    // the smaller of two threads' requests must not come last
    std::atomic<int>& bytes = granted[queue.device % kMaxDevices];
    if (bytes.load(std::memory_order_acquire) < wanted) {
      const std::lock_guard<std::mutex> lock(granting);
      if (bytes.load(std::memory_order_relaxed) < wanted) {
        const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, wanted);
        if (error != cudaSuccess) return error;
        if (cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess)
          (void)cudaGetLastError();  // before sm_90, which has no clusters
        bytes.store(wanted, std::memory_order_release);
      }
    }
  }
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(how.blocks));
  config.blockDim = how.threads;
  config.dynamicSmemBytes = how.shared_bytes;
  config.stream = queue.stream;
  config.attrs = attributes;
  if (how.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {static_cast<unsigned>(how.cluster), 1, 1};
    ++config.numAttrs;
  }
  if (queue.gpu.dependent) {  // may start before the kernel ahead of it in the stream has ended
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
    ++config.numAttrs;
  }
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Returns f(T(), R(), O(), W(), is_aligned) with the element types of input, residual, out and weight, and
// with aligned as a type.
template <class Params, class F>
cudaError_t dispatch(const Params& p, bool aligned, F f) {
  cudaError_t error = cudaSuccess;
  dispatch_dtypes<Half, BFloat16>(
      p.input_dtype, p.residual_dtype, p.out_dtype, p.weight.dtype, [&](auto t, auto r, auto o, auto w) {
        error = aligned ? f(t, r, o, w, std::true_type()) : f(t, r, o, w, std::false_type());
      });
  return error;
}

}  // namespace fused::cuda
