#pragma once

#include <ATen/ATen.h>
#include <torch/library.h>

#include "emulation.h"

namespace at::cuda {

inline cudaDeviceProp* getDeviceProperties(c10::DeviceIndex) {
  static cudaDeviceProp properties = [] {
    cudaDeviceProp fresh = {};
    fresh.multiProcessorCount = emulation::kSms;
    fresh.sharedMemPerBlockOptin = emulation::kSharedBytes;
    return fresh;
  }();
  return &properties;
}

}  // namespace at::cuda

// The kernels are registered for tensors of the CPU, whose device has the index -1.
#define CUDA CPU
#define index() index() + 1
