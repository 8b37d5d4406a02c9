"""Inf, NaN, zeros, denormals, overflow, eps from 1e-12 to 1: the plain PyTorch formula of the casting mode.

Modes differ where the sum overflows residual's dtype. "fp32" normalises the finite sum it holds, and stores
inf; "llama" and "gemma" go on from the stored inf, as the models do: zeros, and NaN where the inf is.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from reference import CASTING_MODES, accumulation_dtype, assert_rounds_to, backward
from torch import Tensor

import fused_add_rms_norm as fused

INF, NAN = float("inf"), float("nan")
EPS = [1e-12, 1e-6, 1e-3, 1.0]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COLS = 40  # whole vectors, and on the CPU a block and a part of one


def eager(
    x: Tensor, r: Tensor, w: Tensor, eps: float, offset: float, casting_mode: str
) -> tuple[Tensor, Tensor]:
    """``out`` before its last rounding, and ``residual_out``: as a model written in PyTorch computes them."""
    compute = accumulation_dtype(x.dtype)

    def norm(h: Tensor) -> Tensor:
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)

    if casting_mode == "fp32":
        h = x.to(compute) + r.to(compute)
        return norm(h) * (offset + w.to(compute)), h.to(r.dtype)
    h = x + r
    n = norm(h.to(compute))
    if casting_mode == "llama":
        n = n.to(r.dtype).to(compute)
    return n * (offset + w.to(compute)), h


def rows(device: str, dtype: torch.dtype) -> tuple[dict[str, int], Tensor, Tensor, Tensor]:
    """One row of input and of residual for each kind of value, and the weight."""
    info = torch.finfo(dtype)
    # The sum of squares stays finite: whether it overflows is a matter of the order of adding.
    large = min(info.max, torch.finfo(accumulation_dtype(dtype)).max ** 0.5 / 16)
    kinds = {
        "zeros": ([0.0], [0.0]),
        "negative zeros": ([-0.0], [-0.0]),
        "the sum cancels": ([1.5], [-1.5]),
        "an inf": ([INF, 1.0, -1.0], [1.0]),
        "infs of both signs": ([INF, -INF, 1.0], [2.0]),
        "inf plus -inf": ([INF, 1.0], [-INF, 1.0]),
        "a NaN": ([NAN, 1.0, 2.0], [0.5]),
        "a NaN in the residual": ([0.5], [NAN, 1.0, 2.0]),
        "the smallest denormal": ([info.smallest_normal * info.eps], [0.0]),
        "denormals": ([info.smallest_normal / 2, -info.smallest_normal / 4], [info.smallest_normal / 4]),
        "the smallest normals": ([info.smallest_normal], [info.smallest_normal]),
        "large": ([large / 2, -large / 4, 1.0], [large / 4]),
        "one large among small": ([large / 2] + [info.smallest_normal] * (COLS - 1), [0.0]),
        "the sum overflows": ([info.max, 1.0, -1.0], [info.max, 2.0]),
        "the negative sum overflows": ([-info.max, 1.0], [-info.max, 0.0]),
        "plain": ([0.5, -1.25, 3.0], [1.0, 0.25]),
    }

    def matrix(side: int) -> Tensor:
        repeated = [list(itertools.islice(itertools.cycle(kind[side]), COLS)) for kind in kinds.values()]
        return torch.tensor(repeated, dtype=torch.float64).to(dtype).to(device)

    w = torch.randn(COLS).to(dtype).to(device)
    return {name: row for row, name in enumerate(kinds)}, matrix(0), matrix(1), w


def slack(exact: Tensor, x: Tensor, casting_mode: str) -> Tensor:
    """The plain formula's own roundings; in "llama", also the normalised value's other neighbour."""
    error = 8 * torch.finfo(accumulation_dtype(x.dtype)).eps
    if casting_mode == "llama":
        error += torch.finfo(x.dtype).eps
    return (exact.abs() * error).nan_to_num(0.0, 0.0, 0.0)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("casting_mode", CASTING_MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_row_equals_the_plain_formula(device, dtype, casting_mode, eps, offset):
    names, x, r, w = rows(device, dtype)
    options = {"offset": offset, "casting_mode": casting_mode}
    exact, exact_h = eager(x, r, w, eps, offset, casting_mode)
    out, h = fused.add_rms_norm(x, r, w, eps, **options)
    torch.testing.assert_close(h, exact_h, rtol=0, atol=0, equal_nan=True)
    for name, row in names.items():
        error = slack(exact[row].double(), x, casting_mode)
        assert_rounds_to(out[row], exact[row].double(), name, error=error)
        assert torch.equal(out[row].isnan(), exact[row].isnan()), name
        alone, _ = fused.add_rms_norm(x[row], r[row], w, eps, **options)
        torch.testing.assert_close(out[row], alone, rtol=0, atol=0, equal_nan=True)

    in_place = x.clone(), r.clone()
    fused.add_rms_norm_(*in_place, w, eps, **options)
    torch.testing.assert_close(in_place, (out, h), rtol=0, atol=0, equal_nan=True)


def test_overflow_of_the_sum_by_mode(device):
    """The difference between the modes, in figures: "fp32" alone has a finite h to normalise."""
    x = torch.tensor([65504.0, 1.0, 1.0, 1.0], dtype=torch.float16, device=device)
    small = 4 / 131008  # h = [131008, 2, 2, 2], rstd = 2 / 131008
    rows = {"fp32": [2.0, small, small, small], "llama": [NAN, 0, 0, 0], "gemma": [NAN, 0, 0, 0]}
    for casting_mode, row in rows.items():
        out, h = fused.add_rms_norm(x, x, None, 1e-6, casting_mode=casting_mode)
        assert h.tolist() == [INF, 2.0, 2.0, 2.0]
        torch.testing.assert_close(out, torch.tensor(row, dtype=torch.float16, device=device), equal_nan=True)


@pytest.mark.parametrize("casting_mode", CASTING_MODES)
def test_fp16_overflows_only_where_the_result_does(device, casting_mode):
    """Each h * weight is beyond fp16, and of the results one."""
    h = torch.tensor([60000.0, -60000.0, 30000.0, 2.0], dtype=torch.float16, device=device)
    w = torch.tensor([40000.0, 60000.0, 1000.0, 65504.0], dtype=torch.float16, device=device)
    assert (h * w).isinf().all()
    out, _ = fused.add_rms_norm(h, torch.zeros_like(h), w, 1e-6, casting_mode=casting_mode)
    assert out.isinf().tolist() == [False, True, False, False]
    exact, _ = eager(h, torch.zeros_like(h), w, 1e-6, 0.0, casting_mode)
    assert_rounds_to(out, exact.double(), "out", error=slack(exact.double(), out, casting_mode))


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_every_kind_of_row(device, dtype, eps):
    """The formula on the stored h, NaN where it has them. A row reaches no other row's grad_input."""
    names, x, r, w = rows(device, dtype)
    _, h, rstd = torch.ops.fused.add_rms_norm_forward(x, r, w, eps, 0.0, "fp32", None)
    dy, dh = torch.randn_like(x), torch.randn_like(r)
    op, rest = torch.ops.fused.add_rms_norm_backward, (w, eps, 0.0, dtype, 5)
    dx, _, dg = op(dy, dh, h, rstd, *rest)
    exact = backward(dy, dh, h, rstd, w)
    for name, row in names.items():
        if exact.grad_input[row].isfinite().all():
            assert_rounds_to(dx[row], exact.grad_input[row], name, error=exact.grad_input_error[row])
        else:
            assert torch.equal(dx[row].isnan(), exact.grad_input[row].isnan()), name
        alone = op(dy[row], dh[row], h[row], rstd[row], *rest)[0]
        torch.testing.assert_close(dx[row], alone, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(dg.isnan(), exact.grad_weight.isnan())
    finite = h.isfinite().all(-1) & rstd.isfinite()
    dg = op(dy[finite], None, h[finite], rstd[finite], *rest)[2]
    exact = backward(dy[finite], None, h[finite], rstd[finite], w)
    assert_rounds_to(dg, exact.grad_weight, "grad_weight", error=exact.grad_weight_error)


@pytest.mark.parametrize("value", [INF, -INF, NAN, 0.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_weight_reaches_one_column(device, dtype, value):
    x, r = torch.randn(3, COLS, device=device).to(dtype), torch.randn(3, COLS, device=device).to(dtype)
    w = torch.randn(COLS, device=device).to(dtype)
    before = fused.add_rms_norm(x, r, w)[0]
    w[33] = value
    out = fused.add_rms_norm(x, r, w)[0]
    exact, _ = eager(x, r, w, 1e-6, 0.0, "fp32")
    torch.testing.assert_close(out[:, 33], exact[:, 33].to(dtype), equal_nan=True)
    others = torch.arange(COLS, device=device) != 33
    assert torch.equal(out[:, others], before[:, others])


@pytest.mark.parametrize("cols", [4096, 65_536, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_rows_of_one_value_keep_their_digits(device, dtype, cols):
    """Equal terms round the same way: added one after the other, their errors add up too."""
    x = torch.full((2, cols), 1 / 3, dtype=dtype, device=device)
    _, rstd = torch.ops.fused.rms_norm_forward(x, None, 1e-6, 0.0, "fp32", None)
    assert_rounds_to(rstd, (x[:, 0].double().square() + 1e-6).rsqrt(), "rstd")


def test_grad_weight_of_many_equal_rows_keeps_its_digits(device):
    x, dy = (torch.full((100_000, 64), value, device=device) for value in (1 / 3, 1 / 7))
    w = torch.ones(64, device=device, requires_grad=True)
    fused.rms_norm(x, w, 1e-6).backward(dy)
    n = x[0].double() * (x[0].double().square().mean() + 1e-6).rsqrt()
    torch.testing.assert_close(w.grad.double(), dy[0].double() * n * len(x), rtol=1e-5, atol=0)
