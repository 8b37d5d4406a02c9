// CUDA host side: which kernel, with which configuration, on the current stream of the tensors' device.
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <mutex>

#include "cuda/kernels.h"
#include "host.h"

namespace fused {
namespace {

using cuda::Gpu;
using cuda::Queue;

constexpr int kVectorBytes = 16;

int itemsize(DType dtype) {
  switch (dtype) {
    case DType::kHalf:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat:
      return 4;
    case DType::kDouble:
      return 8;
  }
  return 0;
}

// What the kernels may ask of a device, found out on its first call.
const Gpu& gpu_of(c10::DeviceIndex device) {
  constexpr int kMaxDevices = 64;
  static Gpu gpus[kMaxDevices];
  static std::atomic<bool> known[kMaxDevices];
  static std::mutex finding_out;
  TORCH_CHECK(device < kMaxDevices, "fused_add_rms_norm: expected a device index below ", kMaxDevices,
              ", got ", device);
  if (known[device].load(std::memory_order_acquire)) return gpus[device];
  const std::lock_guard<std::mutex> lock(finding_out);
  if (!known[device].load(std::memory_order_relaxed)) {
    const cudaDeviceProp* properties = at::cuda::getDeviceProperties(device);
    int target = 0;
    const cudaError_t error = cuda::kernel_target(&target);
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
      (void)cudaGetLastError();
      TORCH_CHECK(false, "fused_add_rms_norm: expected a build for compute capability ", properties->major,
                  ".", properties->minor, " (", properties->name,
                  "), got one without it; rebuild with TORCH_CUDA_ARCH_LIST=", properties->major, ".",
                  properties->minor);
    }
    C10_CUDA_CHECK(error);
    Gpu& gpu = gpus[device];
    gpu.sms = properties->multiProcessorCount;
    gpu.shared_bytes = static_cast<int>(properties->sharedMemPerBlockOptin);
    gpu.hopper = gpu.dependent = target >= 90;
    gpu.clusters[0] = gpu.sms;
    for (int i = 1; gpu.hopper && i < 5; ++i) {
      if (cuda::resident_clusters(1 << i, gpu.shared_bytes, &gpu.clusters[i]) != cudaSuccess) {
        gpu.clusters[i] = 0;  // larger than this GPU schedules
        (void)cudaGetLastError();
      }
    }
    known[device].store(true, std::memory_order_release);
  }
  return gpus[device];
}

// The current stream of the tensor's device.
Queue queue_of(const at::Tensor& tensor) {
  const auto device = tensor.device().index();
  return {gpu_of(device), device, c10::cuda::getCurrentCUDAStream(device)};
}

template <class Params>
cuda::RowShape row_shape_of(const Params& p) {
  return cuda::row_shape(p.shape.cols, itemsize(p.input_dtype), itemsize(p.out_dtype),
                         itemsize(p.residual_dtype));
}

// Every row, and the weight, starts on 16 bytes and holds whole vectors.
template <size_t N>
bool is_aligned(const Shape& shape, int64_t vector_elements, const Weight& weight,
                const std::array<std::pair<const Rows*, DType>, N>& tensors) {
  if (shape.cols % vector_elements != 0) return false;
  if (reinterpret_cast<uintptr_t>(weight.data) % kVectorBytes != 0) return false;
  for (const auto& [rows, dtype] : tensors) {
    if (rows->data == nullptr) continue;
    const int64_t bytes = itemsize(dtype);
    if (reinterpret_cast<uintptr_t>(rows->data) % kVectorBytes != 0) return false;
    if (shape.inner_rows > 1 && rows->inner_stride * bytes % kVectorBytes != 0) return false;
    if (shape.rows > shape.inner_rows && rows->outer_stride * bytes % kVectorBytes != 0) return false;
  }
  return true;
}

struct Cuda {
  static constexpr bool kTracing = false;

  static void forward(const ForwardParams& p, const at::Tensor& input) {
    const c10::cuda::CUDAGuard guard(input.device());
    const Queue queue = queue_of(input);
    const cuda::RowShape row = row_shape_of(p);
    const bool aligned = is_aligned<4>(p.shape, row.elements, p.weight,
                                       {{{&p.input, p.input_dtype},
                                         {&p.residual, p.residual_dtype},
                                         {&p.out, p.out_dtype},
                                         {&p.residual_out, p.residual_dtype}}});
    const auto config = cuda::forward_config(row, p.shape.rows, aligned, queue.gpu);
    C10_CUDA_CHECK(config.kernel == cuda::ForwardKernel::kShared
                       ? cuda::launch_forward_shared(p, config, aligned, queue)
                       : cuda::launch_forward(p, config, aligned, queue));
  }

  static void backward(const BackwardParams& p, const at::Tensor& residual_out) {
    const c10::cuda::CUDAGuard guard(residual_out.device());
    const Queue queue = queue_of(residual_out);
    const cuda::RowShape row = row_shape_of(p);
    const bool aligned = is_aligned<5>(p.shape, row.elements, p.weight,
                                       {{{&p.grad_out, p.out_dtype},
                                         {&p.grad_residual_out, p.residual_dtype},
                                         {&p.residual_out, p.residual_dtype},
                                         {&p.grad_input, p.input_dtype},
                                         {&p.grad_residual, p.residual_dtype}}});
    const bool ring = queue.gpu.hopper && p.input_dtype != DType::kDouble;
    const auto config = cuda::backward_config(row, p.shape.rows, aligned, ring, queue.gpu);

    at::Tensor partials;
    const int64_t partial_rows = p.grad_weight ? cuda::partial_rows(config, p.shape.rows, queue.gpu) : 0;
    if (partial_rows > 0) {
      const auto dtype = p.input_dtype == DType::kDouble ? at::kDouble : at::kFloat;
      partials = at::empty({partial_rows, p.shape.cols}, residual_out.options().dtype(dtype));
    }
    void* partial_data = partial_rows > 0 ? partials.data_ptr() : nullptr;
    C10_CUDA_CHECK(config.kernel == cuda::BackwardKernel::kRing
                       ? cuda::launch_backward_ring(p, config, partial_data, aligned, queue)
                       : cuda::launch_backward(p, config, partial_data, aligned, queue));
    if (partial_rows > 0)
      C10_CUDA_CHECK(cuda::launch_finish_grad_weight(p, partial_data, partial_rows, queue));
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, CUDA, m) { Ops<Cuda>::register_in(m); }

}  // namespace fused
