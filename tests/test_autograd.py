"""Gradients: routing, subsets, second order, and the refusals of the ops that write in place."""

from __future__ import annotations

import itertools

import pytest
import torch
from reference import CASTING_MODES, DTYPES
from torch.autograd import gradcheck, gradgradcheck

import fused_add_rms_norm as fused


def inputs(device: str = "cpu", dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (2, 3, 11)):
    x, r, w = (torch.randn(*s, device=device, dtype=dtype) for s in (shape, shape, shape[-1:]))
    return x.requires_grad_(), r.requires_grad_(), w.requires_grad_()


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("casting_mode", CASTING_MODES)
def test_gradcheck(device, casting_mode, with_weight, offset):
    x, r, w = inputs(device)
    w = w if with_weight else None
    options = {"offset": offset, "casting_mode": casting_mode}
    gradcheck(lambda x, r, w: fused.add_rms_norm(x, r, w, 1e-3, **options), (x, r, w))
    gradcheck(lambda x, w: fused.rms_norm(x, w, 1e-3, **options), (x, w))


@pytest.mark.parametrize("with_weight", [True, False])
def test_second_derivatives(device, with_weight):
    x, r, w = inputs(device)
    w = w if with_weight else None
    gradgradcheck(lambda x, r, w: fused.add_rms_norm(x, r, w, 1e-3, offset=1.0), (x, r, w))
    gradgradcheck(lambda x, w: fused.rms_norm(x, w, 1e-3), (x, w))


@pytest.mark.parametrize("loss", ["out", "residual_out", "both"])
@pytest.mark.parametrize("needs", [n for n in itertools.product([True, False], repeat=3) if any(n)], ids=str)
def test_any_subset_of_inputs_and_results(device, needs, loss):
    """Against autograd on the plain formula, for every input that needs a gradient and no other."""
    tensors = [t.detach().requires_grad_(need) for t, need in zip(inputs(device), needs, strict=True)]
    a, b = torch.randn(2, 3, 11, device=device).double(), torch.randn(2, 3, 11, device=device).double()

    def total(out, h):
        return {
            "out": (out * a).sum(),
            "residual_out": (h * b).sum(),
            "both": (out * a).sum() + (h * b).sum(),
        }[loss]

    def plain(x, r, w):
        h = x + r
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-3) * w, h

    wanted = [t for t in tensors if t.requires_grad]
    value, plain_value = total(*fused.add_rms_norm(*tensors, 1e-3)), total(*plain(*tensors))
    assert value.requires_grad == plain_value.requires_grad
    if not value.requires_grad:  # residual_out does not depend on the weight
        return
    actual = torch.autograd.grad(value, wanted, allow_unused=True)
    expected = torch.autograd.grad(plain_value, wanted, allow_unused=True)
    for got, want in zip(actual, expected, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_gradients_have_their_tensors_dtypes(device, dtypes, weight_dtype):
    input_dtype, residual_dtype, out_dtype = dtypes
    x = torch.randn(4, 24, device=device).to(input_dtype).requires_grad_()
    r = torch.randn(4, 24, device=device).to(residual_dtype).requires_grad_()
    w = torch.randn(24, device=device).to(weight_dtype).requires_grad_()
    out, h = fused.add_rms_norm(x, r, w, out_dtype=out_dtype)
    (out.double().sum() + h.double().sum()).backward()
    assert (x.grad.dtype, r.grad.dtype, w.grad.dtype) == (input_dtype, residual_dtype, weight_dtype)
    torch.testing.assert_close(x.grad.to(residual_dtype), r.grad.to(input_dtype).to(residual_dtype))


def test_only_residual_outs_gradient_is_passed_on(device):
    x, r, w = inputs(device, torch.float32)
    _, h = fused.add_rms_norm(x, r, w)
    dh = torch.randn_like(h)
    dx, dr = torch.autograd.grad(h, (x, r), dh)
    assert torch.equal(dx, dh) and torch.equal(dr, dh)


def test_straight_from_torch_ops(device):
    """No Python wrapper stands between a model and its gradients."""
    x, r, w = inputs(device, torch.float32)
    torch.ops.fused.add_rms_norm(x, r, w)[0].sum().backward()
    assert all(t.grad is not None for t in (x, r, w))
    torch.ops.fused.rms_norm(x, w).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_grad_weight_adds_in_fp32(device, dtype):
    """4096 rows of ones: a bf16 sum would stick at 256, an fp16 sum at 2048."""
    ones = torch.ones(4096, 16, device=device).to(dtype)
    w = torch.ones(16, device=device).to(dtype).requires_grad_()
    fused.rms_norm(ones, w, 1e-20)[0:].backward(ones)
    assert torch.equal(w.grad, torch.full_like(w, 4096.0))


@pytest.mark.parametrize("argument", range(3))
def test_in_place_forms_raise_where_a_gradient_would_be_lost(device, argument):
    tensors = [
        torch.randn(3, 8, device=device),
        torch.randn(3, 8, device=device),
        torch.randn(8, device=device),
    ]
    before = [t.clone() for t in tensors]
    tensors[argument].requires_grad_()
    fresh = torch.empty(3, 8, device=device), torch.empty(3, 8, device=device)
    for call in (lambda: fused.add_rms_norm_(*tensors), lambda: fused.add_rms_norm(*tensors, out=fresh)):
        with pytest.raises(RuntimeError, match="expected tensors that need no gradient"):
            call()
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    with torch.no_grad():
        fused.add_rms_norm(*tensors, out=fresh)
        fused.add_rms_norm_(*tensors)
    assert torch.equal(tensors[0], fresh[0])


@pytest.mark.parametrize("overwritten", [0, 1])
def test_overwriting_a_saved_tensor_is_caught(device, overwritten):
    """In-place forms bump versions: autograd sees that what it saved is gone."""
    for write in ("in place", "out"):
        tensors = [torch.randn(3, 8, device=device) for _ in range(2)]
        w = torch.randn(3, 8, device=device, requires_grad=True)
        loss = (tensors[overwritten] * w).sum()
        versions = [t._version for t in tensors]
        with torch.no_grad():
            if write == "in place":
                fused.add_rms_norm_(*tensors)
            else:
                args = [torch.randn(3, 8, device=device) for _ in range(2)]
                fused.add_rms_norm(*args, out=tuple(tensors))
        assert [t._version for t in tensors] == [v + 1 for v in versions]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_nothing_is_saved_without_grad(device):
    x, r, w = inputs(device, torch.float32)
    with torch.no_grad():
        out, h = fused.add_rms_norm(x, r, w)
    assert not out.requires_grad and not h.requires_grad
    with torch.inference_mode():
        out, h = fused.add_rms_norm(x, r, w)
        fused.add_rms_norm_(out, h, w)
        assert out.is_inference()


def test_internal_ops_say_that_they_have_no_gradient(device):
    x, r, w = inputs(device, torch.float32)
    out, *_ = torch.ops.fused.add_rms_norm_forward(x, r, w, 1e-6, 0.0, "fp32", None)
    with pytest.raises(RuntimeError, match="not implemented"):
        out.sum().backward()
