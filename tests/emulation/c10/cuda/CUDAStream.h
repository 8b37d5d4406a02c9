#pragma once
#include "emulation.h"

namespace c10::cuda {
inline cudaStream_t getCurrentCUDAStream(DeviceIndex) { return nullptr; }
}  // namespace c10::cuda
