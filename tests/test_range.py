"""More than 2^31 and 2^32 elements, and strides beyond 2^31: offsets that 32 bits would wrap.

Tensors are zeros but for chosen rows, which a wrapped offset would read or write elsewhere. Those rows' bits are compared with a call
on them alone, and grad_weight, to which they alone contribute, with that call's.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

import fused_add_rms_norm as fused

EPS = 1e-6


@pytest.fixture
def memory():
    """Skips where a test's tensors would not fit; what it held is given back."""

    def needs(gigabytes: float) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if free < gigabytes * 1e9:
            pytest.skip(f"needs {gigabytes:.0f} GB of GPU memory, {free / 1e9:.0f} are free")

    yield needs
    gc.collect()
    torch.cuda.empty_cache()


def at(rows: int, cols: int, offset: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of zeros, `offset` elements behind an address that every vector load can use."""
    return torch.zeros(offset + rows * cols, dtype=dtype, device="cuda")[offset:].view(rows, cols)


def chosen_rows(rows: int, cols: int) -> Tensor:
    """The first, the last, and those on both sides of element 2^31 and of element 2^32."""
    chosen = {0, 1, rows - 1}
    for elements in (2**31, 2**32):
        chosen |= {row for row in (elements // cols - 1, elements // cols, elements // cols + 1) if 0 <= row < rows}
    return torch.tensor(sorted(chosen), device="cuda")


def check_rows(rows: int, cols: int, offset: int, residual_dtype: torch.dtype = torch.bfloat16) -> None:
    """Each tensor has rows * cols elements; forward, then backward, then in place."""
    x, r = at(rows, cols, offset), at(rows, cols, offset, residual_dtype)
    w = torch.randn(cols, device="cuda").bfloat16()
    chosen = chosen_rows(rows, cols)
    few = [torch.randn(len(chosen), cols, device="cuda").to(t.dtype) for t in (x, r)]
    x[chosen], r[chosen] = few
    expected = torch.ops.fused.add_rms_norm_forward(*few, w, EPS, 0.0, "fp32", None)
    out, h, rstd = torch.ops.fused.add_rms_norm_forward(x, r, w, EPS, 0.0, "fp32", None)
    for actual, wanted in zip((out, h, rstd), expected, strict=True):
        assert torch.equal(actual[chosen], wanted)
    assert torch.count_nonzero(out.view(torch.int16).sum(-1, dtype=torch.int64)) <= len(chosen)
    assert rstd.sum(dtype=torch.float64).item() == pytest.approx(
        expected[2].sum(dtype=torch.float64).item() + (rows - len(chosen)) * EPS**-0.5, rel=1e-6
    )

    dy, dh = out, h  # as good as any gradient
    mask = 5 if x.dtype == r.dtype else 7
    few_grads = torch.ops.fused.add_rms_norm_backward(*expected[:2], *expected[1:], w, EPS, 0.0, x.dtype, mask)
    dx, dr, dg = torch.ops.fused.add_rms_norm_backward(dy, dh, h, rstd, w, EPS, 0.0, x.dtype, mask)
    assert torch.equal(dx[chosen], few_grads[0])
    assert dr is None or torch.equal(dr[chosen], few_grads[1])
    torch.testing.assert_close(dg, few_grads[2])
    del out, h, dx, dr, dy, dh

    fused.add_rms_norm_(x, r, w, EPS)
    assert torch.equal(x[chosen], expected[0]) and torch.equal(r[chosen], expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("rows", [524289, 1048577])
def test_many_rows_of_4096(memory, rows, offset):
    memory(6 * rows * 4096 * 2 / 1e9)
    check_rows(rows, 4096, offset)


@pytest.mark.gpu
@pytest.mark.parametrize("elements", [2**31, 2**32])
@pytest.mark.parametrize("cols", [1, 72, 4097, 70_001], ids=["one column", "a warp a row", "a block a row", "row read twice"])
def test_any_path_past_32_bits(memory, cols, elements):
    """Rows that no vector divides, from one column, where there are most rows, to those that no block holds in registers."""
    memory(7 * elements * 2 / 1e9 + (8 * elements / cols) / 1e9)
    check_rows(elements // cols + 3, cols, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
def test_an_fp32_residual_past_32_bits(memory, offset):
    memory(5 * 2**31 * 5 / 1e9)
    check_rows(2**31 // 4096 + 1, 4096, offset, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("extra", [8, 1], ids=["aligned", "unaligned"])
def test_one_row_of_more_than_32_bits(memory, extra):
    """Ones and, at both ends and about the middle, twos: the mean of squares is 1 to fp32."""
    cols = 2**31 + extra
    memory(11 * cols * 2 / 1e9)
    x = torch.ones(1, cols, dtype=torch.bfloat16, device="cuda")
    twos = torch.tensor([0, cols // 2, 2**31 - 1, 2**31, cols - 1], device="cuda")
    x[0, twos] = 2
    out, rstd = torch.ops.fused.rms_norm_forward(x, None, EPS, 0.0, "fp32", None)
    torch.testing.assert_close(rstd, torch.ones_like(rstd), rtol=1e-5, atol=0)
    assert torch.equal(out[0, twos], x[0, twos]) and out.float().sum().item() > 0
    assert int((out != x).sum()) == 0

    w = torch.ones(cols, dtype=torch.bfloat16, device="cuda")
    dx, _, dg = torch.ops.fused.add_rms_norm_backward(x, None, x, rstd, w, EPS, 0.0, x.dtype, 5)
    assert int((dg != (x * x)[0]).sum()) == 0
    assert dx[0, twos].abs().max().item() < 1e-3 and dx.abs().max().item() < 1e-3


@pytest.mark.parametrize("extra", [0, 5], ids=["aligned", "unaligned"])
def test_strides_past_32_bits(device, memory, extra):
    """Three rows, 2^31 elements apart, of every tensor in one buffer; the memory between them is never touched."""
    stride, cols = 2**31 + extra, 264
    if device == "cuda":
        memory(2 * (2 * stride + 8 * cols) / 1e9)
    try:
        buffer = torch.empty(2 * stride + 8 * cols, dtype=torch.bfloat16, device=device)
    except RuntimeError as error:
        pytest.skip(f"no address space: {error}")

    def rows(slot: int) -> Tensor:
        return buffer.as_strided((3, cols), (stride, 1), slot * cols)

    names = ("input", "residual", "out", "residual_out", "grad_out", "grad_residual_out")
    t = {name: rows(slot) for slot, name in enumerate(names)}
    for tensor in t.values():
        tensor.copy_(torch.randn(3, cols, device=device))
    w = torch.randn(cols, device=device).bfloat16()
    dense = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in t.items()}
    expected = torch.ops.fused.add_rms_norm_forward(dense["input"], dense["residual"], w, EPS, 0.0, "fp32", None)
    for actual, wanted in zip(fused.add_rms_norm(t["input"], t["residual"], w), expected, strict=False):
        assert torch.equal(actual, wanted)
    fused.add_rms_norm(t["input"], t["residual"], w, out=(t["out"], t["residual_out"]))
    assert torch.equal(t["out"], expected[0]) and torch.equal(t["residual_out"], expected[1])

    backward = torch.ops.fused.add_rms_norm_backward
    rest = (expected[2], w, EPS, 0.0, torch.bfloat16, 5)
    grads = backward(dense["grad_out"], dense["grad_residual_out"], expected[1], *rest)
    strided = backward(t["grad_out"], t["grad_residual_out"], t["residual_out"], *rest)
    assert torch.equal(strided[0], grads[0])
    torch.testing.assert_close(strided[2], grads[2])

    fused.add_rms_norm_(t["input"], t["residual"], w)
    assert torch.equal(t["input"], expected[0]) and torch.equal(t["residual"], expected[1])
