"""What the forward computes: every dtype mix, casting mode and option against fp64."""

from __future__ import annotations

import pytest
import torch
from reference import CASTING_MODES, DTYPES, assert_rounds_to, forward
from torch import Tensor

import fused_add_rms_norm as fused

WEIGHT_DTYPES = [None, torch.float16, torch.bfloat16, torch.float32, torch.float64]


def check(out: Tensor, residual_out: Tensor, exact: object) -> None:
    assert_rounds_to(out, exact.out, "out", error=exact.slack)
    assert torch.equal(residual_out, exact.residual_out), "residual_out"


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("casting_mode", CASTING_MODES)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_every_dtype_mix_in_every_form(device, dtypes, casting_mode, weight_dtype, offset):
    input_dtype, residual_dtype, out_dtype = dtypes
    x = torch.randn(5, 3, 200, device=device).to(input_dtype)
    r = torch.randn(5, 3, 200, device=device).to(residual_dtype)
    w = None if weight_dtype is None else torch.randn(200, device=device).to(weight_dtype)
    options = {"offset": offset, "casting_mode": casting_mode}
    exact = forward(x, r, w, 1e-5, **options)

    out, residual_out = fused.add_rms_norm(x, r, w, 1e-5, out_dtype=out_dtype, **options)
    assert (out.dtype, residual_out.dtype) == (out_dtype, residual_dtype)
    check(out, residual_out, exact)

    into = (torch.empty_like(out), torch.empty_like(residual_out))
    assert fused.add_rms_norm(x, r, w, 1e-5, out=into, **options) is into
    assert torch.equal(into[0], out) and torch.equal(into[1], residual_out)

    again, again_h, rstd = torch.ops.fused.add_rms_norm_forward(
        x, r, w, 1e-5, offset, casting_mode, out_dtype
    )
    assert torch.equal(again, out) and torch.equal(again_h, residual_out)
    assert_rounds_to(rstd, exact.rstd, "rstd")

    if out_dtype == input_dtype:
        fused.add_rms_norm_(x, r, w, 1e-5, **options)
        assert torch.equal(x, out) and torch.equal(r, residual_out)


@pytest.mark.parametrize("casting_mode", CASTING_MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rms_norm_is_the_norm_of_a_sum_with_zero(device, dtype, casting_mode):
    x, w = torch.randn(9, 300, device=device).to(dtype), torch.randn(300, device=device).to(dtype)
    out = fused.rms_norm(x, w, 1e-5, offset=1.0, casting_mode=casting_mode)
    expected, h = fused.add_rms_norm(x, torch.zeros_like(x), w, 1e-5, offset=1.0, casting_mode=casting_mode)
    assert torch.equal(out, expected) and torch.equal(h, x)
    exact = forward(x, None, w, 1e-5, 1.0, casting_mode)
    assert_rounds_to(out, exact.out, "out", error=exact.slack)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float16, {"atol": 1e-3, "rtol": 1e-3}),
        (torch.bfloat16, {"atol": 0.0, "rtol": 2.0**-7}),
        (torch.float32, {"atol": 1e-5, "rtol": 0.0}),
    ],
)
def test_close_to_torch(device, dtype, tolerance):
    """The plain form of the rule: allclose to add and F.rms_norm in fp32; one unit in the last place for
    bf16.
    """
    x, r, w = (torch.randn(*shape, device=device).to(dtype) for shape in ((64, 1024), (64, 1024), (1024,)))
    expected = torch.nn.functional.rms_norm(x.float() + r.float(), (1024,), w.float(), 1e-6).to(dtype)
    torch.testing.assert_close(fused.add_rms_norm(x, r, w)[0], expected, **tolerance)


def bf16(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


NUMERIC_ROWS = [
    # The sum's rounding: 1 + 0.0036 is no bf16 number.
    ([1.0] * 4 + [1.9375] * 4, [0.0036163330078125] * 4 + [0.0] * 4, [1.0] * 8, 0.0, 0,
     {"fp32": 0.65234375, "llama": 0.6484375, "gemma": 0.6484375}),
    # The normalised value's rounding before the weight.
    ([1.0] * 4 + [1.6875] * 4, [0.0] * 8, [1.9453125] * 8, 0.0, 4,
     {"fp32": 2.359375, "llama": 2.375, "gemma": 2.359375}),
    # offset + weight in fp32: in bf16, 1 + 0.0039 would be 1 and 1 + 15.8125 would be 16.75.
    ([1.0] * 8, [0.0] * 8, [15.8125] * 8, 1.0, 0, {"fp32": 16.8125, "llama": 16.8125, "gemma": 16.8125}),
    ([255.0] * 8, [0.0] * 8, [0.00390625] * 8, 1.0, 0, {"fp32": 1.0, "llama": 1.0, "gemma": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize("form", ["functional", "in place", "out", "with autograd"])
@pytest.mark.parametrize("casting_mode", CASTING_MODES)
@pytest.mark.parametrize("row", NUMERIC_ROWS)
def test_each_casting_mode_rounds_where_it_says(device, row, casting_mode, form):
    """Values on which the contracts differ, bit for bit: a tolerance would hide a wrong one."""
    x, r, w, offset, column, expected = row
    x, r, w = (bf16(*values).to(device) for values in (x, r, w))
    options = {"offset": offset, "casting_mode": casting_mode}
    if form == "functional":
        out, _ = fused.add_rms_norm(x, r, w, 1e-6, **options)
    elif form == "in place":
        fused.add_rms_norm_(out := x, r, w, 1e-6, **options)
    elif form == "out":
        out, _ = fused.add_rms_norm(x, r, w, 1e-6, out=(torch.empty_like(x), torch.empty_like(r)), **options)
    else:
        out, _ = fused.add_rms_norm(x.requires_grad_(), r, w, 1e-6, **options)
    # Two bf16 values surround 16.8125 * rsqrt(1 + 1e-6), both a rounding away from a tie.
    assert out[column].item() == bf16(expected[casting_mode]).item()


def test_eps_stands_inside_the_root_and_in_fp32(device):
    x = torch.full((8,), 1e-4, dtype=torch.float16, device=device)
    out = fused.rms_norm(x, None, 1e-6)
    assert_rounds_to(out, forward(x, None, None, 1e-6).out, "out")
    assert abs(out[0].item() - 0.09952) < 5e-5  # 0.09887 with eps rounded to fp16


def test_fp16_squares_and_products_do_not_overflow(device):
    x = torch.full((8,), 300.0, dtype=torch.float16, device=device)
    assert fused.rms_norm(x)[0].item() == 1.0
    w = torch.full((8,), 400.0, dtype=torch.float16, device=device)
    out, h = fused.add_rms_norm(torch.full_like(x, 200.0), torch.zeros_like(x), w)
    assert out[0].item() == 400.0 and h[0].item() == 200.0


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (2, 1, 3, 2, 7), (1, 1), (1,)])
def test_any_rank(device, shape):
    x, r, w = (
        torch.randn(*shape, device=device),
        torch.randn(*shape, device=device),
        torch.randn(shape[-1], device=device),
    )
    check(*fused.add_rms_norm(x, r, w), forward(x, r, w, 1e-6))


def test_arguments_stay_as_they_were(device):
    x, r, w = (
        torch.randn(3, 70, device=device),
        torch.randn(3, 70, device=device),
        torch.randn(70, device=device),
    )
    before = [t.clone() for t in (x, r, w)]
    out, h = fused.add_rms_norm(x, r, w)
    assert all(torch.equal(a, b) for a, b in zip((x, r, w), before, strict=True))
    pointers = {t.data_ptr() for t in (x, r, w, out, h)}
    assert len(pointers) == 5 and out.is_contiguous() and h.is_contiguous()
