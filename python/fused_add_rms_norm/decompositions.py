"""The operators in plain ATen operators, for exporters and backends that know nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ._load import _C  # noqa: F401  (registers torch.ops.fused)

__all__ = ["decompose_table"]

GRAD_INPUT, GRAD_RESIDUAL, GRAD_WEIGHT = 1, 2, 4  # bits of output_mask


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def add_rms_norm_forward(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = _accumulation_dtype(input.dtype)
    residual_dtype = input.dtype if residual is None else residual.dtype
    h = input.to(dtype) if residual is None else input.to(dtype) + residual.to(dtype)
    residual_out = h.to(residual_dtype)
    if casting_mode != "fp32":
        h = residual_out.to(dtype)
    rstd = torch.rsqrt(torch.mean(h * h, -1, keepdim=True) + eps)
    n = h * rstd
    if casting_mode == "llama":
        n = n.to(residual_dtype).to(dtype)
    if weight is not None:
        n = n * (weight.to(dtype) + offset)
    out = n.to(input.dtype if out_dtype is None else out_dtype)
    return out.contiguous(), residual_out.contiguous(), rstd.squeeze(-1).contiguous()


def rms_norm_forward(input: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    out, _, rstd = add_rms_norm_forward(input, None, *args)
    return out, rstd


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "fp32",
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    return add_rms_norm_forward(input, residual, weight, eps, offset, casting_mode, out_dtype)[:2]


def rms_norm(
    input: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "fp32",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return add_rms_norm_forward(input, None, weight, eps, offset, casting_mode, out_dtype)[0]


def add_rms_norm_backward(
    grad_out: Tensor,
    grad_residual_out: Tensor | None,
    residual_out: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    input_dtype: torch.dtype,
    output_mask: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dy, h, rstd = grad_out.to(rstd.dtype), residual_out.to(rstd.dtype), rstd.unsqueeze(-1)
    n = h * rstd
    g = dy if weight is None else dy * (weight.to(rstd.dtype) + offset)
    dx = rstd * (g - n * torch.mean(g * n, -1, keepdim=True))
    if grad_residual_out is not None:
        dx = dx + grad_residual_out.to(rstd.dtype)
    grad_weight = None
    if output_mask & GRAD_WEIGHT and weight is not None:
        grad_weight = (dy * n).sum_to_size(weight.shape).to(weight.dtype)
    return (
        dx.to(input_dtype).contiguous() if output_mask & GRAD_INPUT else None,
        dx.to(residual_out.dtype).contiguous() if output_mask & GRAD_RESIDUAL else None,
        grad_weight,
    )


def decompose_table() -> dict[OpOverload, Callable[..., Any]]:
    """What each functional operator is in plain ATen operators, with the same roundings in the same places.

    Returns:
        A table for ``torch.export.ExportedProgram.run_decompositions`` and ``make_fx``.

    Example:
        >>> class Norm(torch.nn.Module):
        ...     def forward(self, x, residual):
        ...         return torch.ops.fused.add_rms_norm(x, residual)
        >>> program = torch.export.export(Norm(), (torch.randn(2, 8), torch.randn(2, 8)))
        >>> program = program.run_decompositions(decompose_table())
        >>> any("fused" in str(node.target) for node in program.graph.nodes)
        False
    """
    ops = torch.ops.fused
    return {
        ops.add_rms_norm.default: add_rms_norm,
        ops.rms_norm.default: rms_norm,
        ops.add_rms_norm_forward.default: add_rms_norm_forward,
        ops.rms_norm_forward.default: rms_norm_forward,
        ops.add_rms_norm_backward.default: add_rms_norm_backward,
    }
