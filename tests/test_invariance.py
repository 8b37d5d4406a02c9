"""A row's bits: the same on every run, in every batch, at every place, on every kernel path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reference import CASTING_MODES, DTYPES
from torch import Tensor

import fused_add_rms_norm as fused

HIDDEN = [24, 100, 576, 1536, 4096, 4097, 5120, 8192, 16384, 65536, 131072]
BATCHES = {"cpu": [1, 2, 16, 64, 70], "cuda": [1, 2, 16, 64, 255, 256, 4096]}
MOST = {"cpu": 70 * 65536, "cuda": 4096 * 65536}  # elements of a tensor


def problem(
    device: str, rows: int, cols: int, dtype: torch.dtype, residual_dtype: torch.dtype
) -> tuple[Tensor, ...]:
    x = torch.randn(rows, cols, device=device).to(dtype)
    r = torch.randn(rows, cols, device=device).to(residual_dtype)
    return x, r, torch.randn(cols, device=device).to(dtype)


def misplaced(t: Tensor) -> Tensor:
    """The same values at an address that no vector load can use."""
    buffer = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return buffer[1:].view(t.shape).copy_(t)


@pytest.mark.parametrize("cols", HIDDEN)
@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16,) * 2, (torch.float16, torch.float32), (torch.float32,) * 2], ids=str
)
def test_a_row_is_the_same_in_every_batch(device, cols, dtypes):
    batches = [rows for rows in BATCHES[device] if rows * cols <= MOST[device]]
    x, r, w = problem(device, max(batches), cols, *dtypes)
    dy, dh = torch.randn_like(x), torch.randn_like(r)
    mask = 1 if x.dtype == r.dtype else 3

    def run(rows: slice, place) -> list[Tensor]:
        a, b, c, d = (place(t[rows]) for t in (x, r, dy, dh))
        out, h, rstd = torch.ops.fused.add_rms_norm_forward(a, b, w, 1e-6, 0.0, "fp32", None)
        dx, dr, _ = torch.ops.fused.add_rms_norm_backward(c, d, place(h), rstd, w, 1e-6, 0.0, x.dtype, mask)
        fused.add_rms_norm_(a := place(a.clone()), b := place(b.clone()), w)
        assert torch.equal(a, out) and torch.equal(b, h)
        return [out, h, rstd, dx] + ([] if dr is None else [dr])

    whole = run(slice(None), Tensor.contiguous)
    for size in batches:
        for start in sorted({0, (max(batches) - size) // 2, max(batches) - size}):
            for place in (Tensor.clone, misplaced):
                for part, all_rows in zip(run(slice(start, start + size), place), whole, strict=True):
                    assert torch.equal(part, all_rows[start : start + size]), (size, start, place)


@pytest.mark.parametrize("casting_mode", CASTING_MODES)
def test_every_form_gives_the_same_bits(device, casting_mode):
    x, r, w = problem(device, 33, 600, torch.bfloat16, torch.bfloat16)
    expected = fused.add_rms_norm(x, r, w, casting_mode=casting_mode)
    with_grad = fused.add_rms_norm(x.clone().requires_grad_(), r, w, casting_mode=casting_mode)
    with torch.inference_mode():
        inference = fused.add_rms_norm(x, r, w, casting_mode=casting_mode)
    fused.add_rms_norm_(x, r, w, casting_mode=casting_mode)
    for other in (with_grad, inference, (x, r)):
        assert torch.equal(other[0], expected[0]) and torch.equal(other[1], expected[1])


@pytest.mark.parametrize("cols", [64, 576, 4096, 4097, 16384])
def test_every_run_gives_the_same_bits(device, cols):
    x, r, w = problem(device, 1000 if device == "cuda" else 100, cols, torch.bfloat16, torch.bfloat16)
    _, h, rstd = torch.ops.fused.add_rms_norm_forward(x, r, w, 1e-6, 0.0, "fp32", None)
    first = None
    for _ in range(20):
        grads = torch.ops.fused.add_rms_norm_backward(x, r, h, rstd, w, 1e-6, 0.0, x.dtype, 5)
        first = first or grads
        assert torch.equal(grads[0], first[0]) and torch.equal(grads[2], first[2])


def test_grad_weight_does_not_depend_on_the_threads():
    x, r, w = problem("cpu", 500, 300, torch.float32, torch.float32)
    _, h, rstd = torch.ops.fused.add_rms_norm_forward(x, r, w, 1e-6, 0.0, "fp32", None)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            results.append(torch.ops.fused.add_rms_norm_backward(x, r, h, rstd, w, 1e-6, 0.0, x.dtype, 5))
    finally:
        torch.set_num_threads(threads)
    assert all(
        torch.equal(a, b) for other in results for a, b in zip(other[::2], results[0][::2], strict=True)
    )


@pytest.mark.parametrize("rows", [3, 5, *(pytest.param(n, marks=pytest.mark.gpu) for n in (100, 600))])
@pytest.mark.parametrize("cols", [24, 4096, 4097, 20000])
@pytest.mark.parametrize("dtypes", DTYPES[1:6:2], ids=str)
def test_a_gradient_has_the_same_bits_whatever_else_is_asked_for(device, dtypes, cols, rows):
    x, r, w = problem(device, rows, cols, *dtypes[:2])
    out, h, rstd = torch.ops.fused.add_rms_norm_forward(x, r, w, 1e-5, 0.0, "fp32", None)
    grads = [torch.randn_like(out), torch.randn_like(h)]

    def backward(mask: int) -> tuple[Tensor | None, ...]:
        return torch.ops.fused.add_rms_norm_backward(*grads, h, rstd, w, 1e-5, 0.0, x.dtype, mask)

    every = 5 if x.dtype == r.dtype else 7
    together = backward(every)
    for bit, expected in zip((1, 2, 4), together, strict=True):
        for mask in range(8):
            if mask & ~every == 0:
                actual = backward(mask)[bit.bit_length() - 1]
                assert (actual is None) == (mask & bit == 0)
                assert actual is None or torch.equal(actual, expected)


def seconds_of_each_thread() -> dict[str, float]:
    """The time that each of the process's threads has been on a core."""
    return {
        task.name: int((task / "schedstat").read_text().split()[0]) / 1e9
        for task in Path("/proc/self/task").iterdir()
    }


def test_cpu_kernels_run_in_parallel():
    """Built without -fopenmp, at::parallel_for would be silently serial."""
    x, r, w = problem("cpu", 2000, 2048, torch.float32, torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fused.add_rms_norm_(x, r, w)
        before = seconds_of_each_thread()
        for _ in range(20):
            fused.add_rms_norm_(x, r, w)
        spent = sorted(after - before.get(task, 0.0) for task, after in seconds_of_each_thread().items())
    finally:
        torch.set_num_threads(threads)
    assert spent[-2] > 0.2 * spent[-1], f"one thread did the work: {spent[-4:]} s"
