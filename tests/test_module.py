"""AddRMSNorm, the layer."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import fused_add_rms_norm as fused


def test_adds_and_normalises(device):
    norm = fused.AddRMSNorm(48, 1e-5, offset=1.0, casting_mode="gemma", device=device, dtype=torch.bfloat16)
    torch.nn.init.normal_(norm.weight)
    x, r = torch.randn(2, 3, 48, device=device).bfloat16(), torch.randn(2, 3, 48, device=device).bfloat16()
    expected = fused.add_rms_norm(x, r, norm.weight, 1e-5, offset=1.0, casting_mode="gemma")
    assert all(torch.equal(a, b) for a, b in zip(norm(x, r), expected, strict=True))


def test_the_first_layer_has_no_residual(device):
    norm = fused.AddRMSNorm(48, device=device)
    x = torch.randn(2, 48, device=device)
    out, residual = norm(x)
    assert residual is x and torch.equal(out, fused.rms_norm(x, norm.weight, norm.eps))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_starts_with_a_scale_of_one(offset):
    norm = fused.AddRMSNorm(16, offset=offset)
    x = torch.randn(4, 16)
    assert torch.equal(norm(x)[0], fused.rms_norm(x))


def test_without_a_weight():
    norm = fused.AddRMSNorm(16, elementwise_affine=False)
    assert norm.weight is None and not list(norm.parameters()) and norm.state_dict() == {}
    x = torch.randn(4, 16)
    assert torch.equal(norm(x)[0], fused.rms_norm(x))


def test_does_not_touch_what_it_is_given(device):
    """A hook that keeps the layer's arguments finds them unchanged."""
    norm = fused.AddRMSNorm(48, device=device)
    x, r = torch.randn(2, 48, device=device), torch.randn(2, 48, device=device)
    kept = []
    norm.register_forward_pre_hook(lambda _, args: kept.extend(t.clone() for t in args))
    with torch.no_grad():
        norm(x, r)
    assert torch.equal(x, kept[0]) and torch.equal(r, kept[1])


def test_copies_saves_and_loads():
    norm = fused.AddRMSNorm(16, 1e-4, offset=1.0, casting_mode="llama")
    torch.nn.init.normal_(norm.weight)
    buffer = io.BytesIO()
    torch.save(norm, buffer)
    buffer.seek(0)
    fresh = fused.AddRMSNorm(16, 1e-4, offset=1.0, casting_mode="llama")
    fresh.load_state_dict(norm.state_dict())
    x, r = torch.randn(3, 16), torch.randn(3, 16)
    for other in (copy.deepcopy(norm), torch.load(buffer, weights_only=False), fresh):
        assert torch.equal(other(x, r)[0], norm(x, r)[0])
        assert (
            repr(other)
            == repr(norm)
            == ("AddRMSNorm(16, eps=0.0001, offset=1.0, casting_mode='llama', elementwise_affine=True)")
        )


def test_a_parametrised_weight():
    norm = fused.AddRMSNorm(16)

    class Doubled(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    torch.nn.utils.parametrize.register_parametrization(norm, "weight", Doubled())
    x, r = torch.randn(3, 16), torch.randn(3, 16)
    out, _ = norm(x, r)
    assert torch.equal(out, fused.add_rms_norm(x, r, torch.full((16,), 2.0))[0])
    out.sum().backward()
    assert norm.parametrizations.weight.original.grad is not None
