// pybind11: the facts of this build. The operators themselves are registered with torch in ops.cpp.
#include <pybind11/pybind11.h>
#include <torch/version.h>

#ifndef FUSED_CUDA_VERSION  // setup.py defines both in a build with CUDA kernels
#define FUSED_CUDA_VERSION nullptr
#define FUSED_CUDA_TARGETS nullptr
#endif

#ifdef __clang__
#define FUSED_COMPILER __VERSION__
#else
#define FUSED_COMPILER "g++ " __VERSION__
#endif

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The compiled operators of fused_add_rms_norm (torch.ops.fused) and facts of their build.";
  module.def("build_info", [] {
    py::dict info;
    info["torch"] = TORCH_VERSION;
    info["cuda"] = static_cast<const char*>(FUSED_CUDA_VERSION);
    info["cuda_targets"] = static_cast<const char*>(FUSED_CUDA_TARGETS);
    info["compiler"] = FUSED_COMPILER;
    info["cxx_standard"] = "C++" + std::to_string(__cplusplus / 100 % 100);
    return info;
  });
}
