"""``python -m fused_add_rms_norm``: the facts for a bug report, and a check of every device."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from . import add_rms_norm
from ._load import _C


def describe(device: torch.device) -> str:
    """The name of a device and what bears on the kernels it runs."""
    if device.type == "cpu":
        return f"{torch.get_num_threads()} threads"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"


def self_check(device: torch.device) -> str:
    """``ok`` where the operator agrees with its formula, else what went wrong."""
    input, residual = torch.randn(2, 7, 257, device=device).unbind()
    weight = torch.randn(257, device=device)
    h = input + residual
    expected = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight
    try:
        out, residual_out = add_rms_norm(input, residual, weight)
    except RuntimeError as error:
        return f"FAILED: {str(error).splitlines()[0]}"
    if torch.equal(residual_out, h) and torch.allclose(out, expected, rtol=1e-5, atol=1e-5):
        return "ok"
    errors = [(got - want).abs().max().item() for got, want in ((out, expected), (residual_out, h))]
    return "FAILED: out is off by {:.1e}, residual_out by {:.1e}".format(*errors)


def main() -> int:
    try:
        release = version("fused-add-rms-norm")
    except PackageNotFoundError:
        release = "(not installed)"
    info = _C.build_info()
    cuda = f"CUDA {info['cuda']} for {info['cuda_targets']}" if info["cuda"] else "without CUDA kernels"
    print(f"fused_add_rms_norm {release} in {Path(__file__).parent}")
    print(f"built:  torch {info['torch']}, {cuda}, {info['compiler']}, {info['cxx_standard']}")
    print(f"runs:   torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}")
    devices = [torch.device("cpu")] + [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    failures = 0
    for device in devices:
        result = self_check(device) if device.type == "cpu" or info["cuda"] else "left out"
        print(f"{device!s:7} {describe(device)}: self-check {result}")
        failures += result.startswith("FAILED")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
