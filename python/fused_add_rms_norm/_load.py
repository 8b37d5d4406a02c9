"""Loads the library that registers ``torch.ops.fused``, and says what to do where it does not fit."""

from __future__ import annotations

import platform
import re
import warnings
from importlib.metadata import PackageNotFoundError, requires

import torch

__all__ = ["_C"]

REBUILD = "In the source folder: pip install --no-build-isolation --no-deps --force-reinstall ."


def explain(error: ImportError, built_for: str) -> str:
    """What a user can do about a library that is missing or cannot be loaded."""
    if isinstance(error, ModuleNotFoundError):
        return f"fused_add_rms_norm is not built for Python {platform.python_version()}. {REBUILD} ({error})"
    return (
        f"fused_add_rms_norm was built for {built_for} and cannot be loaded with torch {torch.__version__}. "
        f"{REBUILD} ({error})"
    )


def required_torch() -> str:
    """The torch that the installed package was built for, by its metadata, which needs no library loaded."""
    try:
        return next(need for need in requires("fused-add-rms-norm") or [] if need.startswith("torch="))
    except (PackageNotFoundError, StopIteration):
        return "another torch"


def has_kernels(capability: tuple[int, int], targets: str) -> bool:
    """Whether a GPU runs a build for ``targets``, written as in TORCH_CUDA_ARCH_LIST.

    Machine code runs on its own major version, from its minor version on; PTX on all later ones; what is made
    for one architecture alone (9.0a), there alone. Names such as Hopper are not looked into.
    """
    found = re.findall(r"(\d+)\.(\d)(a?)(\+PTX)?", targets)
    for major, minor, only, ptx in found:
        target = int(major), int(minor)
        if capability == target or (capability > target and not only and (ptx or capability[0] == target[0])):
            return True
    return not found


def warn_of_gpus_without_kernels(targets: str) -> None:
    """Names the GPUs in sight that this build has no kernels for."""
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        if not has_kernels((major, minor), targets):
            warnings.warn(
                f"fused_add_rms_norm was built for {targets}, which cuda:{index} "
                f"({torch.cuda.get_device_name(index)}, {major}.{minor}) cannot run. "
                f"Set TORCH_CUDA_ARCH_LIST={major}.{minor} and build it again. {REBUILD}",
                stacklevel=2,
            )


try:
    import fused_add_rms_norm._C as _C

    _info = _C.build_info()
    if str(_info["torch"]).split(".")[:2] != torch.__version__.split(".")[:2]:
        raise ImportError(f"it was compiled against torch {_info['torch']}")
except ImportError as error:
    raise ImportError(explain(error, required_torch())) from error

if _targets := _info["cuda_targets"]:
    # Asking a GPU starts CUDA, which an import must not do: the process could not fork any more.
    torch.cuda._lazy_call(lambda: warn_of_gpus_without_kernels(_targets))
