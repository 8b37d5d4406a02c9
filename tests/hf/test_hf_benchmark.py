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


def benchmark(out, *options):
    text = run("benchmarks/hf.py", "--models", "tiny", "--device", "cpu", "--out", out, *options)
    header, *records = [json.loads(line) for line in out.read_text().splitlines()]
    assert header["record"] == "header"
    for record in records:
        assert f"{record['section']}, {record['case']}" in text
    measured = {}
    for record in records:
        if record["status"] == "ok":
            assert record["count"] == len(record["rounds_us"]) > 0
            measured.setdefault((record["section"], record["case"]), set()).add(record["provider"])
    return measured


def test_the_benchmark_times_every_variant(tmp_path):
    measured = benchmark(tmp_path / "hf.jsonl", "--quick")
    assert set(measured) == {("tiny eager", case) for case in ("decode", "prefill", "train")}
    assert all({"upstream", "F.rms_norm", "patched"} <= variants for variants in measured.values())


@pytest.mark.slow
def test_the_benchmark_times_compiled_models_in_turns(tmp_path):
    variants = ["upstream", "patched"]
    measured = benchmark(
        tmp_path / "hf.jsonl", "--only", "CUDA graphs", "compiled train", "--variants", *variants
    )
    wanted = [("tiny compiled", "train"), ("tiny CUDA graphs", "decode")]
    assert measured == {case: set(variants) for case in wanted}


@pytest.mark.slow
def test_the_example_generates_identical_tokens():
    pytest.importorskip("gguf")
    text = run("examples/llama_generate.py", "--tokens", 8, "--device", "cpu")
    assert re.search(r"tokens identical +yes", text)
    assert re.search(r"fused adds in a forward +60 ", text)
