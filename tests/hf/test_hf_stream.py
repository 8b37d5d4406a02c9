"""The parts on their own: the lazy stream, the loop's source, the norm's contract."""

import copy
import operator

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from fused_add_rms_norm.hf.contract import Contract, find_contract
from fused_add_rms_norm.hf.loop import Loop, find_loop
from fused_add_rms_norm.hf.stream import Stream, plain

base, branch = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
total = base + branch

USES = {
    "attribute": (lambda s: s.mean(-1), total.mean(-1)),
    "torch function": (lambda s: torch.cat([s, s]), torch.cat([total, total])),
    "multiplication": (lambda s: 2 * s, 2 * total),
    "subtraction": (lambda s: 1 - s, 1 - total),
    "matmul": (lambda s: s @ torch.ones(8), total @ torch.ones(8)),
    "indexing": (lambda s: s[0, 1:], total[0, 1:]),
    "comparison": (lambda s: s > 0, total > 0),
    "negation": (operator.neg, -total),
    "broadcast add": (lambda s: s + torch.ones(8), total + torch.ones(8)),
    "scalar add": (lambda s: 3 + s, 3 + total),
    "function of a tensor": (lambda s: torch.zeros(8).add(s), total),
    "dtype": (lambda s: s.to(torch.bfloat16), total.bfloat16()),
    "two streams": (lambda s: s + Stream(base), total + base),
    "iteration": (lambda s: torch.stack(list(s)), total),
    "functional": (lambda s: nn.functional.silu(s), nn.functional.silu(total)),
}


@pytest.mark.parametrize("use, expected", USES.values(), ids=USES)
def test_any_other_use_of_a_pending_sum_adds_first(use, expected):
    stream = Stream(base) + branch
    assert stream.branch is branch
    assert torch.equal(plain(use(stream)), expected)
    assert torch.equal(stream.tensor(), total), "whoever reads next finds the sum"


@pytest.mark.parametrize("add", [lambda s, x: s + x, lambda s, x: x + s, torch.add, lambda s, x: x.add(s)])
def test_an_add_of_a_branch_stays_pending(add):
    stream = add(Stream(base), branch)
    assert stream.base is base and stream.branch is branch
    again = add(stream, branch)
    assert torch.equal(again.base, total) and again.branch is branch


def test_what_can_be_told_of_a_sum_is_told_without_adding():
    stream = Stream(base.bfloat16()) + branch
    assert (stream.shape, stream.dtype, stream.device) == (total.shape, torch.float32, total.device)
    assert branch.view(stream.shape).shape == total.shape
    assert stream.to("cpu") is stream is stream.to(torch.device("cpu"), non_blocking=True)
    assert stream.branch is branch


def test_an_in_place_add_writes_to_upstreams_own_tensor():
    mine = base.clone()
    stream = Stream(mine)
    stream += branch
    assert torch.equal(mine, total) and torch.equal(plain(stream), total)


def test_a_stream_is_a_pytree_that_keeps_the_sum_pending():
    stream = Stream(base) + branch
    leaves, structure = pytree.tree_flatten((stream, {"flag": True}))
    assert leaves[0] is base and leaves[1] is branch
    again, _ = pytree.tree_unflatten(leaves, structure)
    assert again.base is base and again.branch is branch
    assert torch.equal(copy.deepcopy(stream).tensor(), total)


def test_plain_reaches_into_containers():
    stream = Stream(base) + branch
    value = plain((stream, [stream, 1], {"key": stream}, torch.return_types.max((base, base))))
    assert (
        torch.equal(value[0], total)
        and torch.equal(value[1][0], total)
        and torch.equal(value[2]["key"], total)
    )


# --- The loop -------------------------------------------------------------------------------------


class Known(nn.Module):
    def forward(self, h, mask=None, **kwargs):
        h = self.embed(h)
        for i, layer in enumerate(self.blocks[: self.config.num_hidden_layers]):
            mask = self.masks[i]
            h = layer(h, mask=mask, **kwargs)
        self.done = True
        h = self.final(h)
        return h


class Indexed(nn.Module):
    def forward(self, h, **kwargs):
        for layer in self.layers:
            h = layer(h, **kwargs)[0]
        return self.norm(h)


class Kept(nn.Module):
    def forward(self, h, **kwargs):
        kept = ()
        for layer in self.layers:
            kept += (h,)
            h = layer(h, **kwargs)
        h = self.norm(h)
        return h, kept


class WithoutKwargs(nn.Module):
    def forward(self, h, **kwargs):
        for layer in self.layers:
            h = layer(h)
        h = self.norm(h)
        return h


class Changed(nn.Module):
    def forward(self, h, **kwargs):
        for layer in self.layers:
            h = layer(h, **kwargs)
        h = h * 2
        h = self.norm(h)
        return h


class Twice(nn.Module):
    def forward(self, h, **kwargs):
        for layer in self.layers:
            h = layer(h, **kwargs)
            h = layer(h, **kwargs)
        h = self.norm(h)
        return h


class Unnormed(nn.Module):
    def forward(self, h, **kwargs):
        for layer in self.layers:
            h = layer(h, **kwargs)
        return h


def test_a_loop_that_hands_the_stream_on_is_recognised():
    assert find_loop(Known) == Loop("blocks", "final")


@pytest.mark.parametrize("cls", [Indexed, Kept, WithoutKwargs, Changed, Twice, Unnormed, nn.Linear])
def test_a_loop_that_does_anything_else_is_not(cls):
    assert find_loop(cls) is None


# --- The contract ---------------------------------------------------------------------------------


class MyRMSNorm(nn.Module):
    def __init__(self, compute, **attributes):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))  # the weights at hand must not decide
        self.compute = compute
        vars(self).update(attributes)

    def forward(self, x):
        return self.compute(self, x)


def normalised(x, eps):
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)


CONTRACTS = {
    "llama": (lambda m, x: m.weight * normalised(x, m.eps).to(x.dtype), Contract("llama", 0.0, "eps")),
    "gpt-oss": (lambda m, x: (m.weight * normalised(x, m.eps)).to(x.dtype), Contract("gemma", 0.0, "eps")),
    "gemma": (
        lambda m, x: (normalised(x, m.eps) * (1 + m.weight.float())).type_as(x),
        Contract("gemma", 1.0, "eps"),
    ),
    "another name of eps": (
        lambda m, x: m.weight * normalised(x, m.epsilon).to(x.dtype),
        Contract("llama", 0.0, "epsilon"),
    ),
    "eps of its own": (lambda m, x: m.weight * normalised(x, 1e-6).to(x.dtype), None),
    "eps outside the root": (
        lambda m, x: (
            m.weight * (x.float() / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + m.eps)).to(x.dtype)
        ),
        None,
    ),
    "a mean subtracted": (
        lambda m, x: m.weight * normalised(x - x.mean(-1, keepdim=True), m.eps).to(x.dtype),
        None,
    ),
    "fp32 out": (lambda m, x: m.weight.float() * normalised(x, m.eps), None),
    "offset in bf16": (lambda m, x: (1 + m.weight) * normalised(x, m.eps).to(x.dtype), None),
    "an error": (lambda m, x: x.gate, None),
}


@pytest.mark.parametrize("compute, expected", CONTRACTS.values(), ids=CONTRACTS)
def test_the_contract_of_a_norm_is_found_by_running_it(compute, expected):
    norm = MyRMSNorm(compute, dropout=0.0, eps=1e-6, epsilon=1e-6)
    before = dict(vars(norm))
    assert find_contract(norm, MyRMSNorm) == expected
    assert vars(norm) == before


def test_finding_a_contract_draws_no_random_numbers():
    state = torch.get_rng_state()
    find_contract(MyRMSNorm(CONTRACTS["gemma"][0], eps=1e-6), MyRMSNorm)
    assert torch.equal(torch.get_rng_state(), state)
