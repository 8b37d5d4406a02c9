"""Many threads, streams and devices at once; the same bits under load; what failed allocations leave."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import fused_add_rms_norm as fused

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
THREADS = 8


def problem(seed: int, device: str | torch.device, rows: int, cols: int) -> tuple[Tensor, ...]:
    """Arguments that differ in shape and dtype from one seed to the next."""
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[seed % len(DTYPES)]
    shapes = ((rows + seed, cols + 8 * seed),) * 4 + ((cols + 8 * seed,),)
    return tuple(torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes)


def step(x: Tensor, r: Tensor, dy: Tensor, dh: Tensor, w: Tensor) -> list[Tensor]:
    """Forward and backward through autograd, and the form in place."""
    leaves = [t.detach().requires_grad_() for t in (x, r, w)]
    out, h = fused.add_rms_norm(*leaves)
    grads = torch.autograd.grad((out, h), leaves, (dy, dh))
    in_place = x.clone(), r.clone()
    fused.add_rms_norm_(*in_place, w)
    return [out.detach(), h.detach(), *grads, *in_place]


def assert_all_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def run_together(workers: int, work: Callable[[int], None]) -> None:
    """Starts all at the same moment; raises what any of them raised."""
    barrier = threading.Barrier(workers)

    def start(worker: int) -> None:
        barrier.wait()
        work(worker)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(start, range(workers)))


def test_threads_on_the_cpu():
    arguments = [problem(seed, "cpu", 40, 200) for seed in range(THREADS)]
    expected = [step(*a) for a in arguments]

    def work(worker: int) -> None:
        for _ in range(20):
            assert_all_equal(step(*arguments[worker]), expected[worker])

    run_together(THREADS, work)


def test_threads_share_arguments(device):
    """Reading the same tensors from many threads needs no lock."""
    arguments = problem(0, device, 40, 300)
    expected = step(*arguments)

    def work(_: int) -> None:
        for _ in range(10):
            assert_all_equal(step(*arguments), expected)

    if device == "cuda":
        torch.cuda.synchronize()
    run_together(THREADS, work)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [64, 4096, 16384])
def test_threads_with_streams_on_every_device(cols):
    """Four streams on each device, a thread each, with another device current where there are two."""
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    places = [device for device in devices for _ in range(4)]
    arguments = [problem(seed, device, 100, cols) for seed, device in enumerate(places)]
    expected = [step(*a) for a in arguments]
    streams = [torch.cuda.Stream(device) for device in places]
    for device in devices:
        torch.cuda.synchronize(device)

    def work(worker: int) -> None:
        torch.cuda.set_device(devices[(worker + 1) % len(devices)])
        with torch.cuda.stream(streams[worker]):
            results = [step(*arguments[worker]) for _ in range(20)]
        streams[worker].synchronize()
        for result in results:
            assert_all_equal(result, expected[worker])

    run_together(len(places), work)


FIRST_CALLS = """
import threading, torch, fused_add_rms_norm as fused

sizes = [64, 576, 2048, 4096, 6144, 8192, 16384, 32768]
barrier, failures = threading.Barrier(len(sizes)), []

def work(cols):
    x, r = (torch.randn(300, cols, device=DEVICE).bfloat16().requires_grad_() for _ in range(2))
    w = torch.ones(cols, device=DEVICE).bfloat16().requires_grad_()
    barrier.wait()
    try:
        for _ in range(3):
            out, h = fused.add_rms_norm(x, r, w)
            torch.autograd.backward((out, h), (x.detach(), r.detach()))
        assert all(t.isfinite().all() for t in (out, h, x.grad, w.grad))
    except Exception as error:
        failures.append((cols, error))

threads = [threading.Thread(target=work, args=(cols,)) for cols in sizes]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failures, failures
"""


def test_first_calls_at_the_same_moment(device):
    """What is found out once about a device or a kernel is then found out by all threads at a time."""
    program = FIRST_CALLS.replace("DEVICE", repr(device))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("cols", [576, 4097])
def test_a_hundred_runs_under_load_give_the_same_bits(device, cols):
    """The load: other calls of the operators, and matrix products, on other threads (and streams)."""
    arguments = problem(1, device, 2000 if device == "cuda" else 50, cols)
    expected = step(*arguments)
    other = problem(2, device, 300, cols + 8)
    square = torch.randn(256, 256, device=device)
    done = threading.Event()

    def load(_: int) -> None:
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream):
            while not done.is_set():
                step(*other)
                torch.mm(square, square)
                if stream is not None:
                    stream.synchronize()

    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(load, i) for i in range(2)]
        try:
            for _ in range(100):
                assert_all_equal(step(*arguments), expected)
        finally:
            done.set()
        for finished in loads:
            finished.result()


def test_a_request_that_is_too_large_leaves_tensors_as_they_were(device):
    """Rows expanded to more than any memory: the arguments exist, the results cannot."""
    x, r, w = (torch.randn(*shape, device=device) for shape in ((1, 64), (1, 64), (64,)))
    before = [t.clone() for t in (x, r, w)]
    huge = [t.expand(1 << 44, 64) for t in (x, r)]
    calls = {
        "add_rms_norm": lambda: fused.add_rms_norm(*huge, w),
        "with autograd": lambda: fused.add_rms_norm(huge[0].detach().requires_grad_(), huge[1], w),
        "rms_norm": lambda: fused.rms_norm(huge[0], w),
        "add_rms_norm_": lambda: fused.add_rms_norm_(*huge, w),  # refused: its rows are one
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError):
            call()
        assert all(torch.equal(a, b) for a, b in zip((x, r, w), before, strict=True)), name
        assert [t._version for t in (x, r, w)] == [0, 0, 0], name
    out, h = fused.add_rms_norm(x, r, w)  # and the next call works
    assert out.isfinite().all() and torch.equal(h, x + r)


@pytest.mark.gpu
def test_in_place_allocates_nothing():
    """With no memory left the functional form fails and changes nothing; those that write in place work."""
    torch.cuda.empty_cache()
    x, r, w = (torch.randn(*shape, device="cuda") for shape in ((4096, 4096), (4096, 4096), (4096,)))
    expected = fused.add_rms_norm(x, r, w)
    before = x.clone(), r.clone()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            fused.add_rms_norm(x, r, w)
        assert torch.equal(x.cpu(), before[0].cpu()) and torch.equal(r.cpu(), before[1].cpu())
        allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
        fused.add_rms_norm_(x, r, w)
        fused.add_rms_norm(*before, w, out=before)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(x, expected[0]) and torch.equal(r, expected[1])
    assert torch.equal(before[0], expected[0]) and torch.equal(before[1], expected[1])
