"""The formulas in fp64, and the one tolerance rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CASTING_MODES = ("fp32", "llama", "gemma")

# (input, residual, out) dtypes of the contract.
DTYPES = [
    (torch.float16, torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32, torch.float32),
    (torch.float64, torch.float64, torch.float64),
    (torch.float16, torch.float32, torch.float16),
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.float16, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32),
]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the operators compute in."""
    return torch.promote_types(dtype, torch.float32)


@dataclass
class Forward:
    out: Tensor
    residual_out: Tensor
    rstd: Tensor
    slack: Tensor | float  # how far out moves when a rounding on the way falls to the other side


def forward(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "fp32",
) -> Forward:
    """The contract in fp64, rounded on the way where it says so and nowhere else."""
    compute = accumulation_dtype(input.dtype)
    stored = input.dtype if residual is None else residual.dtype
    h = input.to(compute) if residual is None else input.to(compute) + residual.to(compute)
    residual_out = h.to(stored)
    h = h.double() if casting_mode == "fp32" else residual_out.double()
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    n = h * rstd
    scale = 1.0 if weight is None else weight.double() + offset
    slack: Tensor | float = 0.0
    if casting_mode == "llama":
        error = 4 * torch.finfo(compute).eps
        low, high = ((n * (1 + sign * error)).to(stored).double() for sign in (-1, 1))
        slack = ((high - low) * scale).abs()
        n = n.to(stored).double()
    return Forward(n * scale, residual_out, rstd.squeeze(-1), slack)


@dataclass
class Backward:
    grad_input: Tensor
    grad_input_error: Tensor
    grad_weight: Tensor | None
    grad_weight_error: Tensor | float


def backward(
    grad_out: Tensor,
    grad_residual_out: Tensor | None,
    residual_out: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    offset: float = 0.0,
) -> Backward:
    """The gradients in fp64, on the stored residual_out and the saved rstd, and the rounding of each."""
    unit = 8 * torch.finfo(rstd.dtype).eps
    h, dy, rstd = residual_out.double(), grad_out.double(), rstd.double().unsqueeze(-1)
    n = h * rstd
    g = dy if weight is None else dy * (weight.double() + offset)
    dx = rstd * (g - n * (g * n).mean(-1, keepdim=True))
    size = rstd * (g.abs() + n.abs() * (g * n).abs().mean(-1, keepdim=True))
    if grad_residual_out is not None:
        dx = dx + grad_residual_out.double()
    if weight is None:
        return Backward(dx, unit * size, None, 0.0)
    terms = (dy * n).reshape(-1, n.shape[-1])
    return Backward(dx, unit * size, terms.sum(0), unit * terms.abs().sum(0))


def assert_rounds_to(actual: Tensor, exact: Tensor, name: str, *, error: Tensor | float = 0.0) -> None:
    """``actual`` is ``exact`` (fp64) within one rounding of actual's dtype: the one tolerance of the tests.

    One unit in the last place: half of it for the rounding itself, and the other for arithmetic in fp32 that
    carries a value over the middle between two neighbours. fp32 and fp64 results, whose arithmetic has no
    digits to spare, have four units. ``error`` is added to it: what cancellation leaves of the terms' own
    roundings.
    """
    assert actual.shape == exact.shape, (
        f"{name}: expected shape {tuple(exact.shape)}, got {tuple(actual.shape)}"
    )
    if actual.numel() == 0:
        return
    info = torch.finfo(actual.dtype)
    units = 1.0 if info.bits == 16 else 4.0
    allowed = units * (exact.abs() * info.eps + info.smallest_normal * info.eps) + error
    deviation = (actual.double() - exact).abs() - allowed
    agrees = (deviation <= 0) | (actual.isnan() & exact.isnan())
    agrees |= actual.isinf() & (exact.abs() * (1 + info.eps) > info.max) & (actual.sign() == exact.sign())
    if not agrees.all():
        worst = int(torch.where(agrees, -torch.inf, deviation.nan_to_num(nan=torch.inf)).argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), actual.shape))
        raise AssertionError(
            f"{name}: {int((~agrees).sum())} of {actual.numel()} elements are off; worst at {index}: "
            f"expected {float(exact.flatten()[worst]):.9g}, got {float(actual.flatten()[worst]):.9g} "
            f"({actual.dtype})"
        )
