def build_info() -> dict[str, str | None]:
    """torch, cuda and cuda_targets (None without CUDA kernels), compiler, cxx_standard."""
