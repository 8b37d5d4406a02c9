"""Autocast, no_grad, inference mode: mixed dtypes are native, so nothing is cast; without grad, no rstd."""

from __future__ import annotations

import pytest
import torch
from observe import operators
from torch import nn

import fused_add_rms_norm as fused

COLS = 32
AUTOCAST_DTYPES = [torch.bfloat16, torch.float16]


def problem(device: str, dtype: torch.dtype, residual_dtype: torch.dtype, weight_dtype: torch.dtype):
    shapes = [((6, COLS), dtype), ((6, COLS), residual_dtype), ((COLS,), weight_dtype)]
    return [torch.randn(shape, device=device).to(kind).requires_grad_() for shape, kind in shapes]


@pytest.mark.parametrize("weight_dtype", ["autocast's", torch.float32])
@pytest.mark.parametrize("residual_dtype", ["autocast's", torch.float32])
@pytest.mark.parametrize("dtype", AUTOCAST_DTYPES)
def test_no_cast_on_the_way_in_or_back(device, dtype, residual_dtype, weight_dtype):
    dtypes = [dtype if other == "autocast's" else other for other in (residual_dtype, weight_dtype)]
    x, r, w = problem(device, dtype, *dtypes)
    results: list[torch.Tensor] = []
    with torch.autocast(device, dtype):
        forward = operators(lambda: results.extend(fused.add_rms_norm(x, r, w)))
        norm = operators(lambda: fused.rms_norm(x, w))
    assert forward == ["fused.add_rms_norm_forward"] and norm == ["fused.rms_norm_forward"]
    assert [t.dtype for t in results] == [dtype, dtypes[0]]
    grads: list[torch.Tensor] = []
    ones = [torch.ones_like(t) for t in results]
    backward = operators(lambda: grads.extend(torch.autograd.grad(results, (x, r, w), ones)))
    assert backward == ["fused.add_rms_norm_backward"]
    assert [t.dtype for t in grads] == [dtype, *dtypes]


@pytest.mark.parametrize("dtype", AUTOCAST_DTYPES)
def test_autocast_changes_no_bit(device, dtype):
    x, r, w = problem(device, dtype, torch.float32, torch.float32)
    expected = fused.add_rms_norm(x, r, w)
    with torch.autocast(device, dtype):
        assert all(torch.equal(a, b) for a, b in zip(fused.add_rms_norm(x, r, w), expected, strict=True))


def test_a_16_bit_branch_joins_an_fp32_stream(device):
    """What autocast leads to: linear layers give bf16, the residual stream and the weights are fp32."""
    linear, norm = nn.Linear(COLS, COLS, device=device), fused.AddRMSNorm(COLS, device=device)
    residual = torch.randn(6, COLS, device=device)
    with torch.autocast(device, torch.bfloat16):
        out, residual_out = norm(linear(residual), residual)
        wide, _ = fused.add_rms_norm(linear(residual), residual, norm.weight, out_dtype=torch.float32)
        loss = linear(out).float().sum() + residual_out.sum()
    assert (out.dtype, residual_out.dtype, wide.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    loss.backward()
    assert linear.weight.grad.dtype == norm.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_the_kernel_saves_nothing(device, mode):
    x, r, w = problem(device, torch.float32, torch.float32, torch.float32)
    with mode():
        assert operators(lambda: fused.add_rms_norm(x, r, w)) == ["fused.add_rms_norm"]
        assert operators(lambda: fused.rms_norm(x, w)) == ["fused.rms_norm"]
        out, residual_out = fused.add_rms_norm(x, r, w)
        assert not out.requires_grad and out.is_inference() == (mode is torch.inference_mode)
        before = out.clone(), residual_out.clone()
        assert operators(lambda: fused.add_rms_norm_(out, residual_out, w)) == ["fused.add_rms_norm_"]
        expected = fused.add_rms_norm(*before, w)
    assert torch.equal(out, expected[0]) and torch.equal(residual_out, expected[1])


def test_tensors_of_inference_mode_may_be_overwritten_outside(device):
    """They have no version to bump."""
    with torch.inference_mode():
        x, r = torch.randn(6, COLS, device=device), torch.randn(6, COLS, device=device)
    expected = fused.add_rms_norm(x, r)
    with torch.inference_mode():
        fused.add_rms_norm_(x, r)
    assert torch.equal(x, expected[0]) and torch.equal(r, expected[1])
