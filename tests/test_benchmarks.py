"""The benchmark harness where there is no GPU: what it counts, records and concludes, and its Triton kernel,
interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
for needed in ("tqdm", "rich", "matplotlib"):
    pytest.importorskip(needed, reason="the bench extra is not installed")

import plots  # noqa: E402
import problems  # noqa: E402
import providers  # noqa: E402
import report  # noqa: E402
import targets  # noqa: E402
from journal import Journal  # noqa: E402
from measurements import Results  # noqa: E402
from problems import Case, Problem  # noqa: E402
from sections import SECTIONS, Bench  # noqa: E402
from timing import Gpu, Sample, on_cpu  # noqa: E402

# Bytes an element: forward reads input and residual and writes both again; backward reads the gradients of
# both results and residual_out, and writes the gradient of the input, and of the residual where that has
# another dtype.
PER_ELEMENT = {"bf16": (8, 8), "fp16": (8, 8), "fp32": (16, 16), "mixed": (12, 16)}


@pytest.mark.parametrize("layout", ["dense", "strided", "misaligned", "odd-stride"])
@pytest.mark.parametrize("dtype", PER_ELEMENT)
def test_bytes_are_those_of_the_tensors_that_this_project_reads_and_writes(dtype: str, layout: str) -> None:
    case = Case(6, 40, dtype, layout)
    problem, fused = Problem(case, "cpu"), providers.fused()[0]
    weight_bytes = 40 * problem.weight.element_size()
    for direction, per_element, weights in zip(
        ("forward", "backward"), PER_ELEMENT[dtype], (1, 2), strict=True
    ):
        work = fused.work(problem, direction)
        expected = 6 * 40 * per_element + weights * weight_bytes
        assert work.bytes_moved(work.results()) == problem.least_bytes(direction) == expected


def test_a_gradient_that_is_returned_twice_is_written_once() -> None:
    problem = Problem(Case(6, 40), "cpu")
    eager = providers.eager()[0].work(problem, "backward")
    assert eager.bytes_moved(eager.results()) == problem.least_bytes("backward")


@pytest.mark.parametrize(
    ("layout", "stride", "offset"),
    [("dense", 40, 0), ("strided", 80, 0), ("misaligned", 40, 1), ("odd-stride", 41, 0)],
)
def test_a_layout_is_what_its_name_says_and_keeps_the_values(layout: str, stride: int, offset: int) -> None:
    values = torch.randn(6, 40)
    arranged = problems.arranged(values, layout)
    assert arranged.stride() == (stride, 1)
    assert arranged.storage_offset() == offset
    assert torch.equal(arranged, values)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", PER_ELEMENT)
def test_reference_agrees_with_autograd_in_fp64(dtype: str, direction: str) -> None:
    problem = Problem(Case(6, 40, dtype), "cpu")
    leaves = [t.detach().double().requires_grad_() for t in (problem.input, problem.residual, problem.weight)]
    results = providers.add_then_rms_norm(*leaves)
    grads = (problem.grad_out.double(), problem.grad_residual_out.double())
    expected = results if direction == "forward" else torch.autograd.grad(results, leaves, grads)
    for value, tensor in zip(expected, problem.reference(direction).values(), strict=True):
        torch.testing.assert_close(tensor, value.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("damage", ["one column", "unwritten", "none"])
def test_a_wrong_result_is_told_from_a_rounded_one(damage: str) -> None:
    problem = Problem(Case(64, 32), "cpu")
    reference = problem.reference("forward")
    out = reference["out"].bfloat16()
    if damage == "one column":
        out[:, 3] = out[:, 4]
    if damage == "unwritten":
        out[63, 31] = float("nan")
    error = problem.worst_error({"out": out}, reference)
    assert (error <= 1) == (damage == "none"), f"{error} times what is tolerated"


class FakeGpu:
    """Stands in for timing.Gpu: times on the CPU."""

    def cold(self, calls):  # type: ignore[no-untyped-def]
        return on_cpu(calls, rounds=3, round_us=100)

    host = cold

    def works(self) -> bool:
        return True


@pytest.mark.parametrize(
    "section", [name for name in SECTIONS if name.split("-")[0] in ("forward", "backward", "host", "cpu")]
)
def test_a_section_records_every_provider(section: str, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "results.jsonl")
    known = providers.fused() + providers.eager()
    gpu = FakeGpu() if SECTIONS[section].needs_gpu else None
    bench = Bench(known, journal, gpu, "cpu", section=section, case=Case(8, 64))  # type: ignore[arg-type]
    SECTIONS[section].measure(bench)
    measured = Results([journal.path]).measured(section, bench.case.name)
    if section == "host-calls":
        expected = {"torch.add", "torch.ops.fused.add_rms_norm", "fused_add_rms_norm.add_rms_norm_"}
        assert expected < measured.keys()
    else:
        training = section.split("-")[-1] in ("backward", "grad", "train")
        taking_part = {provider.name for provider in known if provider.differentiable or not training}
        assert measured.keys() == taking_part | {"torch.add" if section.startswith("host") else "copy"}
    assert all(record["us"] > 0 for record in measured.values())


DRIVER = """
import os, sys
sys.path.insert(0, {benchmarks!r})
import bench, providers
from problems import Case
from providers import Provider
from sections import SECTIONS, Section, cpu_forward

def aborts(x, r, w):
    os.abort()

def refuses(x, r, w):
    raise ValueError("not this shape")

def zeros(x, r, w):
    return x.new_zeros(x.shape), r.new_zeros(r.shape)

def peers():
    functions = (aborts, refuses, zeros, providers.add_then_rms_norm)
    return [Provider(f.__name__, lambda _, f=f: f, on_cpu=True) for f in functions]

def not_installed():
    import no_such_package

providers.PEERS = (peers, not_installed)
SECTIONS.clear()
SECTIONS["cpu-forward"] = Section(cpu_forward, [Case(8, 64)], needs_gpu=False)
sys.exit(bench.main())
"""


def test_a_run_survives_its_providers(tmp_path: Path) -> None:
    """One aborts the process, one raises, one is wrong, one is not installed; the others are measured."""
    driver, out = tmp_path / "driver.py", tmp_path / "results.jsonl"
    driver.write_text(DRIVER.format(benchmarks=str(BENCHMARKS)))
    command = [sys.executable, str(driver), "--out", str(out), "--commit", "abc"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    header, *records = [json.loads(line) for line in out.read_text().splitlines()]
    assert header["commit"] == "abc"
    assert "no_such_package" in header["absent"]["not_installed"]
    assert {record["record"] for record in records} == {"measurement"}
    good = ("copy", "fused", "fused in place", "fused out=", "add_then_rms_norm")
    bad = {"aborts": "crashed", "refuses": "refused", "zeros": "wrong"}
    assert {record["provider"]: record["status"] for record in records} == dict.fromkeys(good, "ok") | bad
    assert next(r["message"] for r in records if r["provider"] == "refuses") == "ValueError: not this shape"
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 2, "a finished file was measured into again"


def write_results(path: Path, factor: float = 1.0, peer: float = 1.1, stored: float = 1.0) -> Results:
    """A run in which this project takes ``factor`` times the copy's time, and one peer ``peer`` times ours
    for ``stored`` times our bytes."""
    journal = Journal(path)
    journal.write("header", date="2026-01-01", peers={"somebody": "1.0"}, absent={}, sms=132)
    for section in ("forward", "backward"):
        for case in (Case(16384, 4096), Case(4096, 16384), Case(4096, 4096)):
            bench = Bench([], journal, None, section=section, case=case)
            times = {"copy": 100.0, "fused": 100 * factor, "Peer": 100 * factor * peer, "Slow": 500.0}
            samples = {name: Sample(us, us - 0.5, us + 0.5, 25) for name, us in times.items()}
            facts = {name: {"bytes": 4e8, "in_place": False} for name in times}
            facts["Peer"]["bytes"] *= stored
            bench.record(samples, facts)
    return Results([path])


def verdicts(results: Results, start: str) -> dict[str, targets.Verdict]:
    return {v.target: v for v in targets.check(results) if v.target.startswith(start) and v.value is not None}


def test_targets_are_met_or_missed_by_what_was_measured(tmp_path: Path) -> None:
    good, bad = write_results(tmp_path / "good", 1.01), write_results(tmp_path / "bad", 1.25, peer=0.9)
    name = "forward, 16384 x 4096 bf16: share of the copy"
    (met,) = verdicts(good, name).values()
    (missed,) = verdicts(bad, name).values()
    assert met.met and met.margin == "met by 0.020"
    assert not missed.met and missed.value == pytest.approx(0.8) and missed.margin == "MISSED by 0.170"
    ahead = "backward, 4096 x 4096 bf16: a peer's time a byte over ours"
    assert verdicts(good, ahead)[ahead].met
    assert not verdicts(bad, ahead)[ahead].met
    assert not verdicts(good, "backward, 4096 x 4096 bf16: the best peer")[
        "backward, 4096 x 4096 bf16: the best peer's time a byte over ours"
    ].met, "1.1 times the best peer is not 1.3"


def test_a_peer_within_the_spread_is_not_ahead(tmp_path: Path) -> None:
    results = write_results(tmp_path / "results", peer=0.998)
    ahead = "forward, 16384 x 4096 bf16: a peer's time a byte over ours"
    assert verdicts(results, ahead)[ahead].met


def test_a_peer_that_stores_less_is_compared_by_the_byte(tmp_path: Path) -> None:
    ahead = "forward, 16384 x 4096 bf16: a peer's time a byte over ours"
    assert verdicts(write_results(tmp_path / "less", peer=0.6, stored=0.5), ahead)[ahead].met
    assert not verdicts(write_results(tmp_path / "same", peer=0.6), ahead)[ahead].met


def test_every_target_names_a_case_that_is_measured() -> None:
    cases = {name: {case.name for case in section.cases} for name, section in SECTIONS.items()}
    for section, case, _ in targets.share_targets():
        assert case.name in cases[section]


def test_comparison_lists_what_became_slower_and_nothing_else(tmp_path: Path) -> None:
    write_results(tmp_path / "old", 1.0)
    write_results(tmp_path / "new", 1.1)
    assert report.main(["--compare", str(tmp_path / "old"), str(tmp_path / "old")]) == 0
    assert report.main(["--compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    rows = report.regressions(Results([tmp_path / "old"]), Results([tmp_path / "new"]), 0.03)
    assert {(row[2], row[4]) for row in rows} == {("fused", "+10.0%"), ("Peer", "+10.0%")}
    assert report.regressions(Results([tmp_path / "new"]), Results([tmp_path / "old"]), 0.03) == []


def test_comparison_lists_what_is_not_measured_any_more(tmp_path: Path) -> None:
    old = write_results(tmp_path / "old")
    lines = (tmp_path / "old").read_text().splitlines()
    (tmp_path / "new").write_text("\n".join(line for line in lines if '"provider": "Peer"' not in line))
    rows = report.regressions(old, Results([tmp_path / "new"]), 0.03)
    assert len(rows) == 6 and {row[4] for row in rows} == {"missing"}


def test_a_later_file_replaces_whole_cases(tmp_path: Path) -> None:
    """A share is a ratio of one run: a later run's time must not meet an earlier run's copy."""
    write_results(tmp_path / "first", 1.0)
    write_results(tmp_path / "second", 2.0)
    lines = (tmp_path / "second").read_text().splitlines()
    (tmp_path / "third").write_text("\n".join(line for line in lines if '"provider": "copy"' not in line))
    both = Results([tmp_path / "first", tmp_path / "second"])
    assert both.share("forward", "4096 x 4096 bf16", "fused") == pytest.approx(0.5)
    assert len(both.headers) == 2
    mixed = Results([tmp_path / "first", tmp_path / "third"])
    assert mixed.share("forward", "4096 x 4096 bf16", "fused") is None


@pytest.mark.parametrize(("first", "second", "share"), [("", "s", 1.0), ("s", "s", 0.5), ("s", "", 0.5)])
def test_a_file_that_skipped_more_does_not_replace_a_case(
    tmp_path: Path, first: str, second: str, share: float
) -> None:
    for name, factor, skips in (("first", 1.0, first), ("second", 2.0, second)):
        write_results(tmp_path / name, factor)
        text = (tmp_path / name).read_text()
        status = '"Slow", "status": "skipped"' if skips else '"Slow", "status": "ok"'
        (tmp_path / name).write_text(text.replace('"Slow", "status": "ok"', status))
    both = Results([tmp_path / "first", tmp_path / "second"])
    assert both.share("forward", "4096 x 4096 bf16", "fused") == pytest.approx(share)


def test_pages_get_their_figures_from_the_results_alone(tmp_path: Path) -> None:
    tables = report.all_tables(write_results(tmp_path / "results", 1.25))
    table = "<!-- table: {} -->\n{}<!-- end -->\n"
    page = "Before.\n" + table.format("forward", "stale 99.99\n") + "After.\n" + table.format("decode", "")
    filled = report.fill_page(page, tables, tmp_path)
    assert "| 16384 x 4096 bf16 | 4.00 | 3.20 (0.80) | 2.91 (0.73) | 0.80 (0.20) |" in filled
    assert "99.99" not in filled and filled.startswith("Before.") and "After." in filled
    assert "Not measured yet." in filled
    plots_at = tmp_path / "plots"
    plot = "<!-- plot: forward -->\n<!-- end -->"
    assert "Not drawn yet." in report.fill_page(plot, tables, plots_at)
    plots.draw(write_results(tmp_path / "results", 1.25), plots_at)
    assert "![forward](plots/forward.svg)" in report.fill_page(plot, tables, plots_at)
    assert report.fill_page(filled, tables, tmp_path) == filled
    with pytest.raises(KeyError, match="no table is called 'nonsense'"):
        report.fill_page("<!-- table: nonsense -->\n<!-- end -->", tables, tmp_path)


def test_the_performance_page_names_tables_that_there_are(tmp_path: Path) -> None:
    page = (BENCHMARKS.parent / "docs" / "performance.md").read_text()
    filled = report.fill_page(page, report.all_tables(Results([])), tmp_path)
    assert filled.count("Not measured yet.") + filled.count("Not drawn yet.") > 10


def test_plots_are_drawn_for_what_was_measured(tmp_path: Path) -> None:
    results = write_results(tmp_path / "results")
    first = {path.name: path.read_text() for path in plots.draw(results, tmp_path / "plots")}
    assert first.keys() == {"forward.svg", "backward.svg"}
    again = {path.name: path.read_text() for path in plots.draw(results, tmp_path / "again")}
    assert first == again, "the same results gave another file"


def test_terminal_tables_show_every_provider(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_results(tmp_path / "results")
    assert report.main([str(tmp_path / "results")]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("Peer", "fused", "16384 x 4096 bf16", "1.00"))


INTERPRETED = """
import itertools, json, sys
sys.path.insert(0, {benchmarks!r})
import torch, triton_kernel
from problems import Case, Problem, arranged

errors = {{}}
for cols, dtype, two_pass, in_place, layout in itertools.product(
    (1, 127, 1000, 8200), ("bf16", "fp32", "mixed"), (False, True), (False, True), ("dense", "odd-stride")
):
    problem = Problem(Case(3, cols, dtype, layout), "cpu")
    reference = problem.reference("forward")
    input, residual = problem.copies()[0], arranged(problem.residual, layout)
    out, residual_out, rstd = triton_kernel.add_rms_norm(
        input, residual, problem.weight, in_place=in_place, two_pass=two_pass, return_rstd=True
    )
    reference["rstd"] = torch.rsqrt(reference["residual_out"].square().mean(-1) + 1e-6)
    error = problem.worst_error(dict(out=out, residual_out=residual_out, rstd=rstd), reference)
    placed = (out is input and residual_out is residual) == in_place
    untouched = in_place or (torch.equal(input, problem.input) and torch.equal(residual, problem.residual))
    name = f"{{cols}} {{dtype}} {{layout}} two_pass={{two_pass}} in_place={{in_place}}"
    errors[name] = [error, placed, untouched]
source, target = torch.randint(2**31, (5000,), dtype=torch.int32), torch.zeros(5000, dtype=torch.int32)
triton_kernel.copy(source, target)
errors["copy"] = [0.0 if torch.equal(source, target) else float("inf"), True, True]
print(json.dumps(errors))
"""


def test_the_triton_kernel_is_right_under_the_interpreter() -> None:
    """In a process of its own: Triton decides while it is imported whether it interprets."""
    pytest.importorskip("triton")
    code = INTERPRETED.format(benchmarks=str(BENCHMARKS))
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    checked = json.loads(done.stdout.splitlines()[-1])
    assert len(checked) == 4 * 3 * 2 * 2 * 2 + 1
    assert [name for name, (error, *flags) in checked.items() if not (error <= 1 and all(flags))] == []


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    stream = torch.cuda.current_stream()
    yield Gpu()
    torch.cuda.set_stream(stream)


@pytest.mark.gpu
def test_gpu_time_holds_no_host_time(gpu: Gpu) -> None:
    x = torch.zeros(1, device="cuda")

    def busy_host() -> None:
        time.sleep(2e-3)
        x.add_(1)

    assert gpu.cold({"busy host": busy_host}, rounds=5)["busy host"].us < 500


@pytest.mark.gpu
def test_a_graph_is_timed_by_the_call(gpu: Gpu) -> None:
    waits = {us: gpu.graph(lambda us=us: gpu._wait(us)) for us in (20, 80)}
    samples = gpu.in_graph({str(us): graph for us, graph in waits.items()}, rounds=5)
    assert samples["80"].us - samples["20"].us == pytest.approx(60, rel=0.5)  # the clock moves


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [1, 4097, 8192, 40000])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_triton_kernel_is_right_on_the_gpu(cols: int, in_place: bool) -> None:
    triton_kernel = pytest.importorskip("triton_kernel")
    problem = Problem(Case(33, cols, "mixed", "odd-stride"), "cuda")
    input, residual = problem.copies()
    results = triton_kernel.add_rms_norm(input, residual, problem.weight, in_place=in_place)
    named = dict(zip(providers.RESULTS, results, strict=True))
    assert problem.worst_error(named, problem.reference("forward")) <= 1
