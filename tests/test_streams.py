"""Streams, CUDA graphs and devices: the operators run where and when their tensors say."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fused_add_rms_norm as fused

pytestmark = pytest.mark.gpu

# Rows x columns, decode and prefill: rows that share a block, rows over a cluster, the backward's ring.
SHAPES = [(1, 4096), (64, 16384), (300, 576), (4096, 4096), (40, 32768), (7, 4097)]
POISON = float("nan")


def tensors(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> list[Tensor]:
    """input, residual, weight, and a gradient of each result."""
    shapes = [(rows, cols), (rows, cols), (cols,), (rows, cols), (rows, cols)]
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def training_step(x: Tensor, r: Tensor, w: Tensor, dy: Tensor, dh: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (x, r, w)]
    results = fused.add_rms_norm(*leaves)
    return [*results, *torch.autograd.grad(results, leaves, (dy, dh))]


def in_place(x: Tensor, r: Tensor, w: Tensor, *_: Tensor) -> list[Tensor]:
    fused.add_rms_norm_(x, r, w)
    return [x, r]


CALLS = {"training step": training_step, "in place": in_place}


def keep_gpu_busy(milliseconds: float = 50.0) -> None:
    """Holds the current stream back: what runs elsewhere meanwhile does not wait for it."""
    torch.cuda._sleep(int(milliseconds * 2_000_000))


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, b), f"result {index}: {int((a != b).sum())} of {a.numel()} elements differ"


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_graph_replays_eagers_bits_over_poisoned_outputs(shape, call):
    """Captured once; then new values in, NaN over every result, replayed."""
    static = tensors(*shape)
    call(*static)  # the first call of a kernel sets its attributes, which a capture may not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(*static)
    for _ in range(3):
        fresh = tensors(*shape)
        for result in results:
            result.fill_(POISON)
        for kept, new in zip(static, fresh, strict=True):
            kept.copy_(new)
        graph.replay()
        assert_same_bits(results, call(*fresh))


def test_graph_of_a_chain_of_calls():
    """Each call reads what the one before it wrote: dependent launches must not read too early."""
    x, r, w, *_ = tensors(1, 4096)

    def chain(x: Tensor, r: Tensor) -> list[Tensor]:
        for _ in range(20):
            fused.add_rms_norm_(x, r, w)
        return [x, r]

    expected = [t.clone() for t in chain(x.clone(), r.clone())]
    static = x.clone(), r.clone()
    chain(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(*static)
    for _ in range(50):
        static[0].copy_(x)
        static[1].copy_(r)
        graph.replay()
        assert_same_bits(list(static), expected)


@pytest.mark.parametrize("changed", range(3), ids=["input", "residual", "weight"])
@pytest.mark.parametrize("shape", [(1, 4096), (64, 8192), (512, 4096)], ids=str)
def test_arguments_written_just_before_are_read_after(shape, changed):
    """The kernel before this one writes an argument, many times over, with nothing between them."""
    args = tensors(*shape)
    alternatives = [args[changed].clone(), torch.randn_like(args[changed])]
    expected = []
    for alternative in alternatives:
        args[changed] = alternative
        expected.append(fused.add_rms_norm(*args[:3]))
    args[changed] = alternatives[0].clone()
    for turn in range(200):
        args[changed].copy_(alternatives[turn % 2])
        assert_same_bits(list(fused.add_rms_norm(*args[:3])), list(expected[turn % 2]))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_side_stream_waits_for_its_own_kernels(call):
    """Its arguments are written there, behind a long kernel; the default stream has nothing to do."""
    args = tensors(64, 4096)
    expected = [t.clone() for t in call(*(t.clone() for t in args))]
    late = [torch.zeros_like(t) for t in args]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        keep_gpu_busy()
        for kept, value in zip(late, args, strict=True):
            kept.copy_(value)
        results = call(*late)
        assert not stream.query(), "the stream was idle before its work was queued: nothing was tested"
    stream.synchronize()
    assert_same_bits(results, expected)


def test_a_busy_default_stream_does_not_hold_a_side_stream_back():
    """Work queued on the side stream finishes while the default stream is still busy."""
    x, r, w, *_ = tensors(64, 4096)
    expected = fused.add_rms_norm(x, r, w)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    keep_gpu_busy(200.0)
    with torch.cuda.stream(stream):
        fused.add_rms_norm_(x, r, w)  # which allocates nothing, so that nothing else can wait
    stream.synchronize()
    assert not torch.cuda.current_stream().query()
    assert_same_bits([x, r], list(expected))


def test_backward_runs_on_the_forwards_stream():
    args = tensors(64, 4096)
    expected = training_step(*args)
    leaves = [t.clone().requires_grad_() for t in args[:3]]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        keep_gpu_busy()
        results = fused.add_rms_norm(*leaves)
    grads = torch.autograd.grad(results, leaves, args[3:])
    torch.cuda.synchronize()
    assert_same_bits([*results, *grads], expected)


# --- Several devices ----------------------------------------------------------------------------------------


@pytest.fixture
def two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensors_on_a_device_that_is_not_current(two_devices, shape, call):
    """Forward and backward, whose thread has a current device of its own; ours stays what it was."""
    args = tensors(*shape)
    elsewhere = [t.to("cuda:1") for t in args]
    expected = call(*args)
    with torch.cuda.device(0):
        results = call(*elsewhere)
        assert torch.cuda.current_device() == 0
    assert all(t.device == torch.device("cuda:1") for t in results)
    assert_same_bits([t.to("cuda:0") for t in results], expected)


def test_arguments_on_two_devices_are_refused(two_devices):
    x, r, w, *_ = tensors(4, 64)
    for args in ((x, r.to("cuda:1"), w), (x, r, w.to("cuda:1"))):
        with pytest.raises(RuntimeError, match="on input's device cuda:0, got cuda:1"):
            fused.add_rms_norm(*args)


def test_two_devices_from_two_threads(two_devices):
    """Each thread has its own device and stream; caches kept for each device are filled at the same time."""
    failures: list[str] = []
    ready = threading.Barrier(2)

    def work(index: int, call: Callable[..., list[Tensor]]) -> None:
        try:
            torch.cuda.set_device(index)
            problems = [tensors(*shape, device=f"cuda:{index}") for shape in SHAPES]
            expected = [[t.clone() for t in call(*(a.clone() for a in args))] for args in problems]
            torch.cuda.synchronize()
            ready.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(10):
                    for args, want in zip(problems, expected, strict=True):
                        assert_same_bits(call(*(a.clone() for a in args)), want)
        except Exception as error:
            failures.append(f"cuda:{index}: {error!r}")
            ready.abort()

    threads = [threading.Thread(target=work, args=(index, training_step)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
