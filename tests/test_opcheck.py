"""Every operator keeps the contract of one: schema, autograd registration, fake tensors, AOTAutograd."""

from __future__ import annotations

import pytest
import torch
from reference import DTYPES
from torch import Tensor

import fused_add_rms_norm  # noqa: F401  (registers the operators)

ops = torch.ops.fused

LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "columns first": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda t: t[:1].expand_as(t),
    "sliced": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
}
WRITABLE = [name for name in LAYOUTS if name not in ("expanded", "columns first")]
COLS = 24


def tensors(device, dtypes=DTYPES[2], layout="contiguous", weight_dtype=None) -> list[Tensor]:
    input_dtype, residual_dtype, _ = dtypes
    x, r = (torch.randn(3, 2, COLS, device=device).to(dtype) for dtype in (input_dtype, residual_dtype))
    w = torch.randn(COLS, device=device).to(weight_dtype or input_dtype)
    return [LAYOUTS[layout](x), LAYOUTS[layout](r), w]


def check(op, *args, **kwargs):
    torch.library.opcheck(op.default, args, kwargs)


def check_functional(args: list[Tensor | None], out_dtype: torch.dtype | None = None) -> None:
    input, residual, weight = args
    check(
        ops.add_rms_norm, input, residual, weight, 1e-5, offset=1.0, casting_mode="llama", out_dtype=out_dtype
    )
    check(ops.rms_norm, input, weight)


def needing_grad(args: list[Tensor], needs: tuple[bool, ...]) -> list[Tensor]:
    """Leaves of the same values and strides."""
    return [arg.detach().requires_grad_(need) for arg, need in zip(args, needs, strict=True)]


@pytest.mark.parametrize(
    "needs", [(False,) * 3, (True,) * 3, (True, False, False), (False, False, True)], ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_functional_ops(device, layout, needs):
    check_functional(needing_grad(tensors(device, layout=layout), needs))


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_functional_ops_of_every_dtype(device, dtypes, weight_dtype):
    args = tensors(device, dtypes, weight_dtype=weight_dtype)
    check_functional(args, dtypes[2])
    check_functional(needing_grad(args, (True,) * 3), dtypes[2])


def test_functional_ops_without_a_weight(device):
    x, r, _ = tensors(device)
    check_functional([x, r, None])
    check_functional([x.requires_grad_(), r.requires_grad_(), None])


@pytest.mark.parametrize("layout", WRITABLE)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_ops_that_write_in_place(device, dtypes, layout):
    x, r, w = tensors(device, dtypes, layout)
    check(
        ops.add_rms_norm_out,
        x,
        r,
        w,
        out=torch.empty_like(x, dtype=dtypes[2]),
        residual_out=torch.empty_like(r),
    )
    check(ops.add_rms_norm_out, x, r, w, out=torch.empty_like(x, dtype=dtypes[2]), residual_out=r)
    check(ops.add_rms_norm_, x, r, w)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_ops_that_autograd_calls(device, dtypes, layout):
    x, r, w = tensors(device, dtypes, layout)
    check(ops.add_rms_norm_forward, x, r, w, 1e-5, 0.0, "fp32", dtypes[2])
    check(ops.rms_norm_forward, x, w, 1e-5, 1.0, "gemma", None)
    out, h, rstd = ops.add_rms_norm_forward(x, r, w, 1e-5, 0.0, "fp32", dtypes[2])
    grad_out, grad_residual_out = (LAYOUTS[layout](torch.randn_like(t)) for t in (out, h))
    mask = 5 if x.dtype == r.dtype else 7
    check(ops.add_rms_norm_backward, grad_out, grad_residual_out, h, rstd, w, 1e-5, 0.0, x.dtype, mask)


@pytest.mark.parametrize("mask", range(8))
def test_backward_of_every_subset(device, mask):
    x, r, w = tensors(device, DTYPES[5])
    out, h, rstd = ops.add_rms_norm_forward(x, r, w, 1e-5, 0.0, "fp32", None)
    check(ops.add_rms_norm_backward, torch.randn_like(out), None, h, rstd, w, 1e-5, 0.0, x.dtype, mask)
    leaves = [t.requires_grad_() for t in (torch.randn_like(out), torch.randn_like(h), h, w)]
    if mask:
        check(ops.add_rms_norm_backward, *leaves[:3], rstd, w, 1e-5, 0.0, x.dtype, mask)


def test_no_rows(device):
    x, w = torch.randn(0, COLS, device=device), torch.randn(COLS, device=device)
    check_functional(needing_grad([x, x, w], (True,) * 3))
