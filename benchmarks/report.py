"""Reads what bench.py and install.py wrote: tables, targets, plots, pages, and a comparison of two runs.

    python benchmarks/report.py RUN.jsonl                        every table
    python benchmarks/report.py RUN.jsonl --check                the targets; exit status 1 if one is missed
    python benchmarks/report.py RUN.jsonl --plots docs/plots     SVG files
    python benchmarks/report.py RUN.jsonl --pages docs/performance.md
    python benchmarks/report.py --compare OLD.jsonl NEW.jsonl    what became slower; exit status 1 if any did

A page gets its figures between ``<!-- table: NAME -->`` (or ``plot: NAME``) and ``<!-- end -->``. Several
files may be given: of a case that two of them hold, the last counts, unless it skipped more providers.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import plots
import targets
from journal import Record
from measurements import COPIES, Results, gbps, half_spread, is_project
from rich.console import Console
from rich.table import Table as RichTable

Rows = list[list[str]]  # the first is the header


def bandwidth(results: Results, record: Record) -> str:
    """TB/s, and the share of the copy."""
    share = results.share(record["section"], record["case"], record["provider"])
    rate = f"{gbps(record) / 1e3:.2f}"
    return rate if record["provider"] in COPIES or share is None else f"{rate} ({share:.2f})"


def microseconds(_: Results, record: Record) -> str:
    return f"{record['us']:.2f}"


def multiples(results: Results, record: Record) -> str:
    """Of torch.add's time."""
    value = results.multiple(record["section"], record["case"], record["provider"], "torch.add")
    return f"{record['us']:.1f} us" if record["provider"] == "torch.add" else f"{value:.2f}"


def kilobytes(_: Results, record: Record) -> str:
    return f"{record['saved_bytes'] / 1024:.0f} + {record['workspace_bytes'] / 1024:.0f}"


@dataclass(frozen=True)
class Table:
    """Cases down, providers across. ``keep`` picks the cases by name."""

    title: str
    section: str
    cell: Callable[[Results, Record], str]
    keep: str = ""
    transposed: bool = False

    def rows(self, results: Results) -> Rows:
        cases = [case for case in results.cases(self.section) if re.search(self.keep, case)]
        names = list(dict.fromkeys(name for case in cases for name in results.of(self.section, case)))
        names.sort(key=lambda name: name not in (*COPIES, "torch.add"))
        body = [[case, *(self._cell(results, case, name) for name in names)] for case in cases]
        table = [["", *names], *body]
        if self.transposed:
            table = [list(column) for column in zip(*table, strict=True)]
        return table if body else []

    def _cell(self, results: Results, case: str, name: str) -> str:
        record = results.of(self.section, case).get(name)
        if record is None:
            return ""
        return self.cell(results, record) if record["status"] == "ok" else record["status"]


BF16_SWEEP = r"^(?!1048576|524288)\d+ x (?!4097|5121|8191)\d+ bf16$"
OTHER_DTYPES = r"(fp16|fp32|mixed)$"
AWKWARD = r"(x (4097|5121|8191|64|128) bf16|strided|misaligned|stride)$"
RATES = "TB/s (share of the copy)"
TABLES = {
    "forward": Table(f"Forward, bf16, {RATES}", "forward", bandwidth, BF16_SWEEP),
    "forward-dtypes": Table(f"Forward, other dtypes, {RATES}", "forward", bandwidth, OTHER_DTYPES),
    "forward-awkward": Table(
        f"Forward, odd, strided, misaligned and short rows, {RATES}", "forward", bandwidth, AWKWARD
    ),
    "backward": Table(f"Backward, bf16, {RATES}", "backward", bandwidth, BF16_SWEEP),
    "backward-dtypes": Table(f"Backward, other dtypes, {RATES}", "backward", bandwidth, OTHER_DTYPES),
    "backward-awkward": Table(
        f"Backward, odd, strided and misaligned rows, {RATES}", "backward", bandwidth, AWKWARD
    ),
    "decode": Table("Decode, us a call in a CUDA graph", "decode", microseconds),
    "decode-backward": Table(
        "Backward of few rows, us a call in a CUDA graph", "decode-backward", microseconds
    ),
    "host-calls": Table("Host cost, multiples of torch.add", "host-calls", multiples, transposed=True),
    "host-forward": Table("Host cost of a forward, multiples of torch.add", "host-forward", multiples),
    "host-grad": Table("Host cost of a forward with grad on, multiples of torch.add", "host-grad", multiples),
    "host-train": Table("Host cost of forward + backward, multiples of torch.add", "host-train", multiples),
    "memory": Table("Memory of a training step: saved + workspace, KiB", "memory", kilobytes),
    "timers": Table("This harness and do_bench, us", "timers", microseconds, transposed=True),
    "cpu-forward": Table("CPU forward, us", "cpu-forward", microseconds),
    "cpu-backward": Table("CPU backward, us", "cpu-backward", microseconds),
}


def environment_rows(results: Results) -> Rows:
    facts = (
        "date",
        "commit",
        "dirty",
        "gpu",
        "driver",
        "torch",
        "cuda",
        "triton",
        "python",
        "cpu",
        "cpu_threads",
    )
    rows = [["", *(f"run {i + 1}" for i in range(len(results.headers)))]]
    rows += [[fact, *(str(header.get(fact)) for header in results.headers)] for fact in facts]
    peers = [", ".join(f"{k} {v}" for k, v in header["peers"].items()) for header in results.headers]
    absent = [", ".join(f"{k} ({v})" for k, v in header["absent"].items()) for header in results.headers]
    return [*rows, ["peers", *peers], ["not loaded", *absent]]


def refusal_rows(results: Results) -> Rows:
    """Who did not take part where, and why."""
    rows = [["", "case", "provider", "message"]]
    for record in results:
        if record["status"] != "ok":
            where = f"{record['section']}: {record['status']}"
            rows.append([where, record["case"], record["provider"], record["message"].splitlines()[0]])
    return rows if len(rows) > 1 else []


def install_rows(results: Results) -> Rows:
    """What install.py tried: time and memory of the whole command, dependencies left out."""
    rows = [["", "", "kernels", "minutes", "GiB", ""]]
    for case in results.cases("install"):
        for way, record in results.of("install", case).items():
            took = (f"{record['seconds'] / 60:.1f}", f"{record['gib']:.1f}")
            outcome = record["message"] if record["status"] == "ok" else record["status"]
            rows.append([case, way, record.get("kernels", ""), *took, outcome])
    return rows if len(rows) > 1 else []


def target_rows(results: Results) -> Rows:
    if not results.headers:
        return []
    rows = [["target", "measured", "bound", "", ""]]
    for verdict in targets.check(results):
        value = "" if verdict.value is None else f"{verdict.value:.3f}"
        bound = f"{'>=' if verdict.at_least else '<='} {verdict.bound:.3f}"
        rows.append([verdict.target, value, bound, verdict.margin, verdict.detail])
    return rows


# section, case, what is shown of it
SUMMARY = (
    ("forward", "16384 x 4096 bf16", "Forward, 16384 x 4096, TB/s", bandwidth),
    ("backward", "16384 x 4096 bf16", "Backward, 16384 x 4096, TB/s", bandwidth),
    ("backward", "4096 x 16384 bf16", "Backward, 4096 x 16384, TB/s", bandwidth),
    ("decode", "1 x 4096 bf16", "Decode, 1 x 4096, us in a CUDA graph", microseconds),
    ("decode", "64 x 4096 bf16", "Decode, 64 x 4096, us in a CUDA graph", microseconds),
    ("host-forward", "1 x 4096 bf16", "Host time of a forward, in torch.add's", multiples),
    ("host-train", "1 x 4096 bf16", "Host time of forward + backward, in torch.add's", multiples),
    ("cpu-forward", "2048 x 4096 bf16", "CPU forward, 2048 x 4096 bf16, us", microseconds),
)


def summary_rows(results: Results) -> Rows:
    """A few lines for the README: this project at its best, what PyTorch users write, the fastest other."""
    rows = [["bf16", "this project", "add + F.rms_norm", "fastest other measured", ""]]
    for section, case, title, cell in SUMMARY:
        times = {name: record["us"] for name, record in results.measured(section, case).items()}
        ours = min(filter(is_project, times), key=times.__getitem__, default=None)
        others = [name for name in times if not is_project(name) and name not in (*COPIES, "torch.add")]
        if ours is None or "add + F.rms_norm" not in others:
            continue
        fastest = min(others, key=times.__getitem__)
        cells = (
            cell(results, results.of(section, case)[name]) for name in (ours, "add + F.rms_norm", fastest)
        )
        rows.append([title, *cells, fastest])
    return rows if len(rows) > 1 else []


def all_tables(results: Results) -> dict[str, tuple[str, Rows]]:
    """Title and rows by name."""
    return {
        "environment": ("Runs", environment_rows(results)),
        "summary": ("Summary", summary_rows(results)),
        **{name: (table.title, table.rows(results)) for name, table in TABLES.items()},
        "install": ("Ways to install", install_rows(results)),
        "refusals": ("Refused, wrong, skipped or crashed", refusal_rows(results)),
        "targets": ("Targets", target_rows(results)),
    }


def print_table(title: str, rows: Rows) -> None:
    table = RichTable(*rows[0], title=title)
    for row in rows[1:]:
        table.add_row(*row)
    # A table is as wide as it is: cut lines are worse than long ones where the output is a file.
    Console(width=None if sys.stdout.isatty() else 400, markup=False).print(table)


def markdown(rows: Rows) -> str:
    if not rows:
        return "Not measured yet."
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def fill_page(text: str, tables: dict[str, tuple[str, Rows]], folder: Path) -> str:
    """The text with every table and plot between its markers replaced; an unknown name is an error."""

    def filled(match: re.Match[str]) -> str:
        kind, name = match["kind"], match["name"]
        if kind == "plot":
            drawn = folder / f"{name}.svg"
            content = f"![{name}]({folder.name}/{name}.svg)" if drawn.exists() else "Not drawn yet."
        elif name in tables:
            content = markdown(tables[name][1])
        else:
            raise KeyError(f"no table is called {name!r}: there are {', '.join(tables)}")
        return f"<!-- {kind}: {name} -->\n{content}\n<!-- end -->"

    return re.sub(
        r"<!-- (?P<kind>table|plot): (?P<name>\S+) -->\n.*?<!-- end -->", filled, text, flags=re.DOTALL
    )


def regressions(old: Results, new: Results, tolerance: float) -> Rows:
    """What takes longer by more than the tolerance and by more than both runs' spreads, and what is not
    measured any more."""
    rows: Rows = []
    for before in old:
        if before["status"] != "ok" or "us" not in before:
            continue
        where = [before["section"], before["case"], before["provider"]]
        after = new.of(*where[:2]).get(where[2])
        if after is None or after["status"] != "ok":
            rows.append([*where, "", after["status"] if after else "missing"])
            continue
        slower = after["us"] / before["us"] - 1
        if slower > tolerance and after["us"] - before["us"] > half_spread(before) + half_spread(after):
            rows.append([*where, f"{before['us']:.2f} -> {after['us']:.2f} us", f"{slower:+.1%}"])
    return rows


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument(
        "--check", action="store_true", help="print the targets; exit status 1 if one is missed"
    )
    parser.add_argument("--plots", type=Path, metavar="FOLDER")
    parser.add_argument("--pages", type=Path, nargs="+", metavar="PAGE", default=[])
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"))
    parser.add_argument(
        "--tolerance", type=float, default=0.03, help="for --compare: slower by less is noise"
    )
    args = parser.parse_args(argv)
    if not args.results and not args.compare:
        parser.error("no results are given")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.compare:
        old, new = (Results([path]) for path in args.compare)
        rows = regressions(old, new, args.tolerance)
        header = ["section", "case", "provider", "", "slower"]
        print_table(f"Regressions by more than {args.tolerance:.0%}", [header, *rows])
        return 1 if rows else 0

    results = Results(args.results)
    tables = all_tables(results)
    if args.plots:
        plots.draw(results, args.plots)
    for page in args.pages:
        page.write_text(fill_page(page.read_text(), tables, page.parent / "plots"))
    if args.check:
        print_table(*tables["targets"])
        verdicts = targets.check(results)
        missed = [verdict for verdict in verdicts if not verdict.met]
        print(f"{len(verdicts) - len(missed)} of {len(verdicts)} targets met")
        return 1 if missed else 0
    if not args.plots and not args.pages:
        _print_all(tables.values())
    return 0


def _print_all(tables: Iterable[tuple[str, Rows]]) -> None:
    for title, rows in tables:
        if rows:
            print_table(title, rows)


if __name__ == "__main__":
    sys.exit(main())
