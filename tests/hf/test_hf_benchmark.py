"""The end-to-end benchmark and the example run, small, on the CPU."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command):
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout


def test_the_benchmark_times_every_variant(tmp_path):
    out = tmp_path / "hf.jsonl"
    text = run("benchmarks/hf.py", "--models", "tiny", "--quick", "--device", "cpu", "--out", out)
    header, *records = [json.loads(line) for line in out.read_text().splitlines()]
    assert header["record"] == "header"
    for case in ("decode", "prefill", "train"):
        found = {record["provider"]: record for record in records if record["case"] == case}
        assert {"upstream", "F.rms_norm", "patched"} <= {n for n, r in found.items() if r["status"] == "ok"}
        assert f"tiny eager, {case}" in text


@pytest.mark.slow
def test_the_example_generates_identical_tokens():
    pytest.importorskip("gguf")
    text = run("examples/llama_generate.py", "--tokens", 8, "--device", "cpu")
    assert re.search(r"tokens identical +yes", text)
    assert re.search(r"fused adds in a forward +60 ", text)
