"""Measures this project against a copy of the same bytes and against every installed peer.

    python benchmarks/bench.py                    everything; report.py reads the file it writes
    python benchmarks/bench.py --quick            this project and the copy alone
    python benchmarks/bench.py --sections cpu     what needs no GPU

Each case takes its providers in turn: bind, check against fp64, and only then time, all of them interleaved
with the copy. A provider that raises is recorded as refused, with its message; one whose result is wrong, as
wrong. The measuring happens in a child process: should a provider take that down, it is recorded as crashed,
and a new child goes on.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import providers
import torch
from journal import Journal, environment
from sections import CONTEXT_LOST, EVERYBODY, SECTIONS, Bench, precompile
from timing import Gpu
from tqdm import tqdm

STALL_S = 120  # a child that records nothing for so long hangs


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results.jsonl"), help="the file to write; if it is there, go on"
    )
    parser.add_argument(
        "--sections", nargs="+", default=list(SECTIONS), help=f"or how they start: {', '.join(SECTIONS)}"
    )
    parser.add_argument("--quick", action="store_true", help="no peers")
    parser.add_argument("--cases", default="", help="only the cases whose name holds this text")
    parser.add_argument(
        "--budget-s", type=float, default=480, help="seconds after which nothing new is compiled"
    )
    parser.add_argument(
        "--jobs", type=int, default=0, help="processes that fill the compilers' disk caches beforehand"
    )
    parser.add_argument("--commit", help="the commit measured, where git cannot say")
    parser.add_argument(
        "--child", help=argparse.SUPPRESS
    )  # "measure", or "i/n": compile the i-th of n shards
    args = parser.parse_args()
    args.sections = [name for name in SECTIONS if name.startswith(tuple(args.sections))]
    if not torch.cuda.is_available():
        args.sections = [name for name in args.sections if not SECTIONS[name].needs_gpu]
        args.jobs = 0
    if Journal(args.out).complete:
        parser.error(f"{args.out} holds a whole run already")
    if not args.sections:
        parser.error("no section to measure: there is no GPU, or none is named so")
    return args


def measure(args: argparse.Namespace) -> None:
    """The child: every case that is not done yet."""
    journal = Journal(args.out)
    known, absent = providers.load(providers.PROJECT if args.quick else providers.PROJECT + providers.PEERS)
    if not any(provider.is_project for provider in known):
        sys.exit(f"fused_add_rms_norm: {absent['fused']}")
    if not journal.has(record="header"):
        journal.write("header", started=time.time(), **environment(args.commit, absent))
    started = journal.records[0]["started"]
    gpu = Gpu() if torch.cuda.is_available() else None

    tasks = [
        (name, case)
        for name in args.sections
        for case in SECTIONS[name].cases
        if args.cases in case.name and not journal.has(record="done", section=name, case=case.name)
    ]
    weights = [SECTIONS[name].weight for name in args.sections]
    bar = tqdm(tasks, file=sys.stdout, mininterval=0.5 if sys.stdout.isatty() else 15)
    for name, case in bar:
        bar.set_description(f"{name}, {case.name}")
        spent = sum(weights[: args.sections.index(name) + 1]) / max(sum(weights), 1)
        on_gpu = SECTIONS[name].needs_gpu
        bench = Bench(known, journal, gpu if on_gpu else None, "cuda" if on_gpu else "cpu")
        bench.section, bench.case, bench.deadline = name, case, started + args.budget_s * spent
        try:
            SECTIONS[name].measure(bench)
        except Exception as error:  # the harness itself, at one case: the others are still worth measuring
            tqdm.write(f"{name}, {case.name}: {type(error).__name__}: {error}")
            bench.refused(EVERYBODY, error, "failed")
        journal.write("done", section=name, case=case.name)


def child(args: argparse.Namespace, role: str) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"} if "/" in role else None
    return subprocess.Popen([sys.executable, *sys.argv, "--child", role], env=environ)


def wait(process: subprocess.Popen[bytes], path: Path) -> int:
    """The child's exit status; it is killed where its file has not grown for STALL_S."""
    started = time.time()
    while True:
        try:
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            grown = max(path.stat().st_mtime if path.exists() else 0, started)
            if time.time() - grown > STALL_S:
                process.kill()


def main() -> int:
    args = arguments()
    if args.child == "measure":
        measure(args)
        return 0
    if args.child:
        shard, shards = map(int, args.child.split("/"))
        known, _ = providers.load(providers.PEERS)
        precompile(Bench(known, Journal(args.out), Gpu()), args.sections, shard, shards)
        return 0

    started = time.time()
    for process in [child(args, f"{i}/{args.jobs}") for i in range(args.jobs)]:
        try:
            process.wait(timeout=max(1.0, started + args.budget_s / 4 - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
    if args.jobs:
        print(f"caches filled in {time.time() - started:.0f} s")

    for _ in range(20):
        status = wait(child(args, "measure"), args.out)
        journal = Journal(args.out)
        attempt = journal.unfinished_attempt()
        if not attempt and status != CONTEXT_LOST:
            break
        if attempt:
            message = f"the process ended with status {status}"
            journal.write("measurement", **attempt, status="crashed", message=message)
            if attempt["provider"] == EVERYBODY:
                journal.write("done", section=attempt["section"], case=attempt["case"])
    if status == 0:
        journal.finish()
    print(f"{args.out}: {journal.count('measurement')} measurements in {time.time() - started:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
