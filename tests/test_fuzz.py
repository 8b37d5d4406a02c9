"""Random shapes, strides, dtypes, overlaps and gradients, chosen and shrunk by hypothesis. fuzz.py has what is called and checked."""

from __future__ import annotations

import functools

from arena import Arena
from fuzz import ARENA_BYTES, LARGE, SMALL, check, some_case
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
