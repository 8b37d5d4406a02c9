"""The pages that name tests name tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def defined(name: str, path: str) -> bool:
    return re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE) is not None


@pytest.mark.parametrize("page", ["docs/pytorch.md"])
def test_every_test_named_exists(page):
    """A row of a table without a test is a promise that nothing keeps."""
    rows = [
        line for line in (ROOT / page).read_text().splitlines() if re.match(r"\|(?!-| \||[^|]*where )", line)
    ]
    assert rows
    for row in rows:
        references = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row)
        assert references, f"no test named: {row}"
        for path, name in references:
            assert (ROOT / path).exists() and (not name or defined(name, path)), (
                f"no such test: {path}::{name}"
            )


def test_every_distributed_check_named_exists():
    page = (ROOT / "docs/distributed.md").read_text()
    named = set(re.findall(r"`([a-z0-9_]+)`(?=[\],]| \|\n)", page))
    assert len(named) > 5
    for name in named:
        assert defined(name, "tests/distributed/test_distributed.py"), f"no such check: {name}"
