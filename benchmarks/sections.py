"""What each section of a run measures, case by case."""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import problems
import torch
from journal import Journal, Record
from problems import Case, Problem
from providers import Provider
from timing import Call, Gpu, Sample, on_cpu

EVERYBODY = "*"
CONTEXT_LOST = 70  # exit status of a process whose CUDA context a provider broke

Timer = Callable[[Mapping[str, Call]], dict[str, Sample]]


@dataclass
class Bench:
    """What a section needs: who is measured, where the results go, and until when a provider may compile."""

    providers: list[Provider]
    journal: Journal
    gpu: Gpu | None
    device: str = "cuda"
    deadline: float = float("inf")
    section: str = ""
    case: Case = field(default_factory=lambda: Case(1, 1))

    def key(self, provider: str) -> Record:
        return {"section": self.section, "case": self.case.name, "provider": provider}

    def taking_part(self, direction: str) -> list[Provider]:
        return [
            provider
            for provider in self.providers
            if (self.case.peers or not provider.compiles)
            and (direction == "forward" or provider.differentiable)
            and (self.gpu or provider.on_cpu)
        ]

    def refused(self, provider: str, error: Exception, status: str = "refused") -> None:
        """Records what a provider raised. If that broke the CUDA context, the process is of no more use."""
        message = f"{type(error).__name__}: {error}".strip()[:300]
        self.journal.write("measurement", **self.key(provider), status=status, message=message)
        if self.gpu and not self.gpu.works():
            os._exit(CONTEXT_LOST)

    def attempts(self, direction: str) -> list[Provider]:
        """Who may try this case: not who refused or crashed before it had to start again, nor who would
        compile when the time for that is over."""
        fresh = [
            provider
            for provider in self.taking_part(direction)
            if not self.journal.has(record="measurement", **self.key(provider.name))
        ]
        late = [provider for provider in fresh if provider.compiles and time.time() > self.deadline]
        for provider in late:
            self.refused(provider.name, TimeoutError("the section's time was spent"), "skipped")
        return [provider for provider in fresh if provider not in late]

    def checked(self, problem: Problem, direction: str) -> dict[str, tuple[Call, Record]]:
        """The calls of the providers that take the problem and get it right, with what is known of each."""
        reference = problem.reference(direction)
        good: dict[str, tuple[Call, Record]] = {}
        for provider in self.attempts(direction):
            self.journal.write("attempt", **self.key(provider.name))
            try:
                problems.poison(problem)
                work = provider.work(problem, direction)
                results = work.results()
                error = problem.worst_error(results, reference)
                if not error <= 1:
                    raise ArithmeticError(f"an error of {error:.3g} times what is tolerated")
                moved = work.bytes_moved(results)
                facts = {"bytes": moved, "error": round(error, 4), "in_place": provider.in_place}
                good[provider.name] = work.run, facts
            except ArithmeticError as exception:
                self.refused(provider.name, exception, "wrong")
            except Exception as exception:  # a peer may raise anything
                self.refused(provider.name, exception)
        return good

    def timing_starts(self) -> None:
        """From here on no single provider is to blame for a crash."""
        self.journal.write("attempt", **self.key(EVERYBODY))

    def record(self, samples: dict[str, Sample], known: dict[str, Record] | None = None) -> None:
        """One record a sample, with what else is known of it."""
        for name, sample in samples.items():
            facts = {**self.case.facts, **asdict(sample), **(known or {}).get(name, {})}
            self.journal.write("measurement", **self.key(name), status="ok", **facts)

    def against_a_copy(self, direction: str, timer: Timer) -> None:
        """Forward or backward, beside a copy that reads half of the least bytes and writes the other half."""
        problem = Problem(self.case, self.device)
        good = self.checked(problem, direction)
        words = problem.least_bytes(direction) // 8
        source = torch.randint(2**31, (words,), dtype=torch.int32, device=self.device)
        target = torch.empty_like(source)
        calls: dict[str, Call] = {"copy": lambda: target.copy_(source)}
        if self.section.startswith("decode") and self.device == "cuda":
            import triton_kernel

            calls["copy kernel"] = lambda: triton_kernel.copy(source, target)  # copy_ may be no kernel
        known: dict[str, Record] = {name: {"bytes": 8 * words} for name in calls}
        for name, (call, facts) in good.items():
            calls[name], known[name] = call, facts
        self.timing_starts()
        samples = timer(calls)
        for name in calls.keys() - samples.keys():
            if not self.journal.has(record="measurement", **self.key(name)):
                self.refused(name, TimeoutError("the host could not be kept ahead of the GPU"))
        self.record(samples, known)

    def cold(self, calls: Mapping[str, Call]) -> dict[str, Sample]:
        assert self.gpu
        return self.gpu.cold(calls)

    def in_graph(self, calls: Mapping[str, Call]) -> dict[str, Sample]:
        assert self.gpu
        graphs = {}
        for name, call in calls.items():
            try:
                graphs[name] = self.gpu.graph(call)
            except Exception as exception:  # not every peer can be captured
                self.refused(name, exception)
        return self.gpu.in_graph(graphs)

    def host(self, calls: Mapping[str, Call]) -> None:
        """Host time of these calls, and of torch.add as their unit."""
        assert self.gpu
        problem = Problem(self.case, self.device)
        calls = {"torch.add": lambda: torch.add(problem.input, problem.residual), **calls}
        for name in list(calls):
            self.journal.write("attempt", **self.key(name))
            try:
                calls[name]()
            except Exception as exception:
                self.refused(name, exception)
                del calls[name]
        self.timing_starts()
        self.record(self.gpu.host(calls))


def forward(bench: Bench) -> None:
    bench.against_a_copy("forward", bench.cold)


def backward(bench: Bench) -> None:
    bench.against_a_copy("backward", bench.cold)


def decode(bench: Bench) -> None:
    bench.against_a_copy("forward", bench.in_graph)


def decode_backward(bench: Bench) -> None:
    bench.against_a_copy("backward", bench.in_graph)


def cpu_forward(bench: Bench) -> None:
    bench.against_a_copy("forward", on_cpu)


def cpu_backward(bench: Bench) -> None:
    bench.against_a_copy("backward", on_cpu)


def host_calls(bench: Bench) -> None:
    """The ways to call this project from Python."""
    import fused_add_rms_norm as package

    problem = Problem(bench.case, bench.device)
    ops, x, r, w = torch.ops.fused, problem.input, problem.residual, problem.weight
    a, b = problem.copies()
    bench.host(
        {
            "torch.ops.fused.add_rms_norm_": lambda: ops.add_rms_norm_(a, b, w),
            "torch.ops.fused.add_rms_norm_.default": lambda: ops.add_rms_norm_.default(a, b, w),
            "fused_add_rms_norm.add_rms_norm_": lambda: package.add_rms_norm_(a, b, w),
            "torch.ops.fused.add_rms_norm": lambda: ops.add_rms_norm(x, r, w),
            "torch.ops.fused.add_rms_norm.default": lambda: ops.add_rms_norm.default(x, r, w),
            "fused_add_rms_norm.add_rms_norm": lambda: package.add_rms_norm(x, r, w),
        }
    )


def host_forward(bench: Bench) -> None:
    """A forward, no gradient wanted."""
    problem = Problem(bench.case, bench.device)
    bench.host({p.name: p.work(problem, "forward").run for p in bench.attempts("forward")})


def host_grad(bench: Bench) -> None:
    """A forward that records for the backward."""
    problem = Problem(bench.case, bench.device)
    leaves = problem.leaves()

    def call_of(provider: Provider) -> Call:
        function = provider.bind(problem)
        return lambda: function(*leaves)

    bench.host({provider.name: call_of(provider) for provider in bench.attempts("backward")})


def host_train(bench: Bench) -> None:
    """A forward and its backward, through autograd."""
    problem = Problem(bench.case, bench.device)
    bench.host({provider.name: provider.train_call(problem) for provider in bench.attempts("backward")})


def memory(bench: Bench) -> None:
    """What training holds on to beyond its inputs, results and gradients."""
    assert bench.gpu
    problem = Problem(bench.case, bench.device)
    leaves, grads = problem.leaves(), (problem.grad_out, problem.grad_residual_out)
    for provider in bench.attempts("backward"):
        bench.journal.write("attempt", **bench.key(provider.name))
        gc.collect()
        try:
            function = provider.bind(problem)
            torch.autograd.grad(function(*leaves), leaves, grads)  # compiles, and allocates what stays
            before = torch.cuda.memory_allocated()
            results = function(*leaves)
            saved = torch.cuda.memory_allocated() - before - problems.bytes_of(results)
            step = functools.partial(torch.autograd.grad, results, leaves, grads)
            peak, gradients = bench.gpu.peak_bytes(step)
            workspace = peak - problems.bytes_of(gradients)
        except Exception as exception:
            bench.refused(provider.name, exception)
            continue
        facts = {**bench.case.facts, "saved_bytes": saved, "workspace_bytes": workspace}
        bench.journal.write("measurement", **bench.key(provider.name), status="ok", **facts)
        del results, gradients, step


def timers(bench: Bench) -> None:
    """This harness and do_bench on the same calls: they agree where the flush outlasts the host's part."""
    from triton.testing import do_bench

    problem = Problem(bench.case, bench.device)
    calls = {
        f"{provider.name}, {direction}": provider.work(problem, direction).run
        for direction in ("forward", "backward")
        for provider in bench.attempts(direction)
        if not provider.compiles
    }
    samples = bench.cold(calls)
    for name, call in calls.items():
        median, p20, p80 = (1e3 * ms for ms in do_bench(call, quantiles=(0.5, 0.2, 0.8)))
        samples = {**samples, f"{name}, do_bench": Sample(median, p20, p80, 0)}
    bench.record(samples)


@dataclass(frozen=True)
class Section:
    """``weight``: its part of the time in which providers may compile."""

    measure: Callable[[Bench], None]
    cases: Sequence[Case]
    weight: float = 0.5
    needs_gpu: bool = True


SECTIONS = {
    "forward": Section(forward, problems.FORWARD, 5),
    "backward": Section(backward, problems.BACKWARD, 5),
    "decode": Section(decode, problems.DECODE, 3),
    "decode-backward": Section(decode_backward, problems.DECODE_BACKWARD),
    "host-calls": Section(host_calls, problems.HOST),
    "host-forward": Section(host_forward, problems.HOST),
    "host-grad": Section(host_grad, problems.HOST),
    "host-train": Section(host_train, problems.HOST),
    "memory": Section(memory, problems.MEMORY),
    "timers": Section(timers, problems.TIMERS),
    "cpu-forward": Section(cpu_forward, problems.CPU, 0, needs_gpu=False),
    "cpu-backward": Section(cpu_backward, problems.CPU, 0, needs_gpu=False),
}


def precompile(bench: Bench, sections: Sequence[str], shard: int, shards: int) -> None:
    """Fills the disk caches of the compilers that keep one, for one shard of the cases. Measures nothing."""
    tasks = [
        (section, case)
        for section in sections
        if section in ("forward", "backward", "decode", "decode-backward")
        for case in SECTIONS[section].cases
        if case.peers
    ]
    for section, case in tasks[shard::shards]:
        direction = "backward" if section.endswith("backward") else "forward"
        problem, bench.case = Problem(case, bench.device), case
        for provider in bench.taking_part(direction):
            if provider.compiles and provider.caches:
                try:
                    provider.work(problem, direction).run()
                except Exception:  # it is recorded when the case is measured
                    if bench.gpu and not bench.gpu.works():
                        return
