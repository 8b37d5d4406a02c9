"""Activation checkpointing recomputes the same bits, and policies can keep or recompute the operators."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from observe import operators
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fused_add_rms_norm as fused

COLS = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = fused.AddRMSNorm(COLS, offset=1.0)
        self.linear = nn.Linear(COLS, COLS)
        nn.init.normal_(self.norm.weight)

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        out, residual = self.norm(input, residual)
        return self.linear(out).relu(), residual


class InPlaceInside(Block):
    """Writes over tensors of its own, where nothing needs a gradient: what it is given is left alone."""

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            scale, stream = input.clone(), residual.clone()
            fused.add_rms_norm_(scale, stream, self.norm.weight, offset=1.0)
        out, residual = super().forward(input, residual)
        return out * scale, residual


def gradients(block: nn.Module, run, x: Tensor, r: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_(), r.clone().requires_grad_()]
    out, residual = run(*leaves)
    out, residual = run(out, residual)
    loss = out.square().sum() + residual.sin().sum()
    loss.backward()
    grads = [t.grad for t in [*leaves, *block.parameters()]]
    block.zero_grad()
    return [loss, *grads]


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("block_type", [Block, InPlaceInside])
def test_same_gradients(device, block_type, use_reentrant):
    block = block_type().to(device)
    x, r = torch.randn(2, 6, COLS, device=device).unbind()
    before = x.clone(), r.clone()
    expected = gradients(block, block, x, r)
    actual = gradients(block, partial(checkpoint, block, use_reentrant=use_reentrant), x, r)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert torch.equal(x, before[0]) and torch.equal(r, before[1])


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_policies_see_the_operator(device, policy):
    def decide(context, op, *args, **kwargs):
        ours = op is torch.ops.fused.add_rms_norm_forward.default
        return policy if ours else CheckpointPolicy.PREFER_RECOMPUTE

    block = Block().to(device)
    x, r = torch.randn(2, 6, COLS, device=device).unbind()
    expected = gradients(block, block, x, r)
    contexts = partial(create_selective_checkpoint_contexts, decide)
    run = partial(checkpoint, block, use_reentrant=False, context_fn=contexts)
    actual: list[Tensor] = []
    names = operators(lambda: actual.extend(gradients(block, run, x, r)))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    times = 1 if policy == CheckpointPolicy.MUST_SAVE else 2
    assert names.count("fused.add_rms_norm_forward") == 2 * times, names
