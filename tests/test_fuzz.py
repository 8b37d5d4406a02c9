"""Random shapes, strides, dtypes, overlaps, gradients, chosen and shrunk by hypothesis; see fuzz.py."""

from __future__ import annotations

import functools

import pytest
import torch
from arena import Arena, dense
from fuzz import ARENA_BYTES, LARGE, SMALL, check
from fuzz_cases import some_case
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

arena_of = functools.cache(lambda device: Arena(device, ARENA_BYTES))


@st.composite
def cases(draw, max_numel):
    return some_case(lambda options: draw(st.sampled_from(options)), max_numel)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(case=cases(SMALL))
def test_small_tensors(device, case):
    event(check(case, arena_of(device)))


@settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))
@given(case=cases(LARGE))
def test_large_tensors(device, case):
    event(check(case, arena_of(device)))


@pytest.mark.parametrize("element", [-1, 24])
def test_the_arena_sees_a_write_outside_a_tensor(device, element):
    arena = arena_of(device)
    with arena:
        inside = arena.place((3, 8), torch.bfloat16, dense(2))
        inside.zero_()
    with pytest.raises(AssertionError, match="outside every tensor"), arena:
        tensor = arena.place((3, 8), torch.bfloat16, dense(2))
        tensor.as_strided((1,), (1,), tensor.storage_offset() + element).zero_()


def test_fresh_memory_is_nan_and_guarded(device):
    """What operators get from `at::empty` too: results, what they save, scratch memory."""
    arena = arena_of(device)
    with arena, arena.serving():
        assert torch.empty(2, 3, device=device).isnan().all()
        torch.ops.fused.rms_norm(torch.ones(2, 8, device=device))
        assert len(arena.fresh) == 3  # that, the ones, and the norm
