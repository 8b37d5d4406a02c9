"""Devices, and the seed of every test."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

with suppress(ImportError):  # test_fuzz.py alone needs it
    from hypothesis import settings

    # The same examples on every run; with `make fuzz` new ones, as many as one core tries in half an hour.
    settings.register_profile("ci", max_examples=1000, derandomize=True, database=None)
    settings.register_profile("long", max_examples=50_000, print_blob=True)
    settings.load_profile("ci")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device that the operators run on."""
    return str(request.param)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
