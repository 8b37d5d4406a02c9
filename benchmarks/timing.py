"""Four ways to time a call, each for a question of its own. All take several calls and time them in turn,
round by round, so that what the machine does meanwhile falls on all of them alike; all report a median and
the 20th and 80th percentiles.

- ``cold``: GPU time of one call that finds nothing in L2 (a training step's or a prefill's norm). Between the
  flush and the start event the GPU busy-waits, so that the host has queued the whole call before the first
  event passes; a round in which it had not is thrown away. ``triton.testing.do_bench`` flushes too but does
  not wait: where the host takes longer than the flush (autograd, most peers' backward), host time ends up in
  its figure. Where it does not, the two agree, which ``bench.py --sections timers`` shows.
- ``in_graph``: GPU time of one call of many in a CUDA graph, inputs in L2 (a decode step's norm). do_bench
  does not fit: its flush is the opposite of decoding, and one launch costs more than the kernel.
- ``host``: wall clock of the host alone, nothing waited for. ``torch.utils.benchmark`` synchronises at the
  end of a measurement, so it shows whichever of the two is slower.
- ``on_cpu``: ``torch.utils.benchmark``, made for it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.utils.benchmark

Call = Callable[[], object]
T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """Microseconds of one call: median, 20th and 80th percentile, and of how many."""

    us: float
    us_p20: float
    us_p80: float
    count: int

    @staticmethod
    def of(times: Iterable[float]) -> Sample:
        ordered = sorted(times)
        low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.8))
        return Sample(round(statistics.median(ordered), 4), round(low, 4), round(high, 4), len(ordered))


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection in here: it would fall on whoever is being timed."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Gpu:
    """The timers of one GPU, and what they need to know of it. Works on a stream of its own, which graphs can
    capture and on which autograd's nodes then run too."""

    FLUSH_BYTES = 256 * 2**20  # several times any L2

    def __init__(self) -> None:
        torch.cuda.set_stream(torch.cuda.Stream())
        self._flush = torch.empty(self.FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self._cycles_per_us = self._measure_clock()

    def _measure_clock(self) -> float:
        cycles, best = 2_000_000, 0.0
        for _ in range(3):  # the clock climbs under load: the fastest one waits long enough at any other
            start, end = _events()
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
            best = max(best, cycles / (1e3 * start.elapsed_time(end)))
        return best

    def _wait(self, us: float) -> None:
        torch.cuda._sleep(int(us * self._cycles_per_us))

    def works(self) -> bool:
        """Whether the context is usable. A failed launch stays CUDA's last error, for the next innocent call
        to raise: the first try takes that away."""
        for _ in range(2):
            try:
                torch.cuda.synchronize()
                torch.zeros(1, device="cuda").add_(1).item()
            except Exception:
                continue
            return True
        return False

    def cold(self, calls: Mapping[str, Call], rounds: int = 25) -> dict[str, Sample]:
        """GPU time of each call with a cold L2. A call that the host cannot be kept ahead of is left out."""
        lead = {name: 1.5 * _host_us(call) + 30 for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        with quiet():
            for _ in range(4 * rounds):
                for name, call in calls.items():
                    if len(times[name]) == rounds:
                        continue
                    start, end = _events()
                    self._flush.zero_()
                    self._wait(lead[name])
                    start.record()
                    call()
                    end.record()
                    host_was_ahead = not start.query()
                    end.synchronize()
                    if host_was_ahead:
                        times[name].append(1e3 * start.elapsed_time(end))
                    else:
                        lead[name] *= 1.5
        return {name: Sample.of(taken) for name, taken in times.items() if len(taken) == rounds}

    def graph(self, call: Call, calls: int = 20) -> torch.cuda.CUDAGraph:
        """A CUDA graph of so many calls, one after another."""
        for _ in range(3):  # compile, load and allocate what the first calls do
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with quiet():  # a tensor freed by the collector would break the capture
            graph.capture_begin()
            try:
                for _ in range(calls):
                    call()
            finally:
                graph.capture_end()
        return graph

    def in_graph(
        self, graphs: dict[str, torch.cuda.CUDAGraph], calls: int = 20, rounds: int = 25
    ) -> dict[str, Sample]:
        """GPU time of one of a graph's calls: each replay is timed right behind an untimed one, which leaves
        its data in L2 and hides the launch of the graph."""
        times: dict[str, list[float]] = {name: [] for name in graphs}
        with quiet():
            for _ in range(4 * rounds):
                for name, graph in graphs.items():
                    if len(times[name]) == rounds:
                        continue
                    start, end = _events()
                    self._wait(300)
                    graph.replay()
                    start.record()
                    graph.replay()
                    end.record()
                    host_was_ahead = not start.query()
                    end.synchronize()
                    if host_was_ahead:
                        times[name].append(1e3 * start.elapsed_time(end) / calls)
        return {name: Sample.of(taken) for name, taken in times.items() if len(taken) == rounds}

    def host(self, calls: Mapping[str, Call], rounds: int = 7, inner: int = 200) -> dict[str, Sample]:
        """Host time of each call, nothing waited for; each round is a mean of ``inner`` calls."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            for _ in range(20):
                call()
        with quiet():
            for _ in range(rounds):
                for name, call in calls.items():
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    for _ in range(inner):
                        call()
                    times[name].append(1e6 * (time.perf_counter() - start) / inner)
            torch.cuda.synchronize()
        return {name: Sample.of(taken) for name, taken in times.items()}

    def peak_bytes(self, call: Callable[[], T]) -> tuple[int, T]:
        """Bytes allocated at once during a call, beyond those before it, and its result."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        return torch.cuda.max_memory_allocated() - before, result


def on_cpu(calls: Mapping[str, Call], rounds: int = 15, round_us: float = 5e4) -> dict[str, Sample]:
    """Wall clock of each call on torch's threads; each round is a mean over about ``round_us``."""
    threads = torch.get_num_threads()
    timers = {
        name: torch.utils.benchmark.Timer("call()", globals={"call": call}, num_threads=threads)
        for name, call in calls.items()
    }
    counts = {name: max(1, int(round_us / (1e6 * timer.timeit(3).mean))) for name, timer in timers.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, timer in timers.items():
            times[name].append(1e6 * timer.timeit(counts[name]).mean)
    return {name: Sample.of(taken) for name, taken in times.items()}


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _host_us(call: Call, tries: int = 3) -> float:
    """The longest of a few calls' host times, after one that compiles and allocates."""
    call()
    longest = 0.0
    for _ in range(tries):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        longest = max(longest, 1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return longest
