"""More than 2^31 and 2^32 elements, and strides beyond 2^31: offsets that 32 bits would wrap.

Tensors are zeros but for chosen rows, which a wrapped offset would read or write elsewhere. Their results are
compared, bit for bit, with those of a call on these rows alone, which other tests compare with fp64; so is
grad_weight, to which no other row contributes.
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


def chosen_rows(rows: int, cols: int) -> list[int]:
    """The first, the last, and those about element 2^31 and element 2^32."""
    chosen = {0, 1, rows - 1}
    for elements in (2**31, 2**32):
        chosen |= {elements // cols + by for by in (-1, 0, 1)}
    return sorted(row for row in chosen if 0 <= row < rows)


def check_rows(rows: int, cols: int, offset: int, residual_dtype: torch.dtype = torch.bfloat16) -> None:
    """Each tensor has rows * cols elements; forward, then backward, then in place."""
    w = torch.randn(cols, device="cuda").bfloat16()
    chosen = chosen_rows(rows, cols)

    def check(actual: Tensor, few: Tensor) -> None:
        assert torch.equal(torch.stack([actual[row] for row in chosen]), few)
        assert torch.count_nonzero(actual) == torch.count_nonzero(few), "rows that should be zeros are not"

    x, r = at(rows, cols, offset), at(rows, cols, offset, residual_dtype)
    few = [torch.randn(len(chosen), cols, device="cuda").to(t.dtype) for t in (x, r)]
    for i, row in enumerate(chosen):
        x[row], r[row] = few[0][i], few[1][i]
    few_out, few_h, few_rstd = torch.ops.fused.add_rms_norm_forward(*few, w, EPS, 0.0, "fp32", None)
    out, h, rstd = torch.ops.fused.add_rms_norm_forward(x, r, w, EPS, 0.0, "fp32", None)
    check(out, few_out)
    check(h, few_h)
    _, rstd_of_zeros = torch.ops.fused.rms_norm_forward(x.new_zeros(1, cols), w, EPS, 0.0, "fp32", None)
    assert torch.equal(torch.stack([rstd[row] for row in chosen]), few_rstd)
    assert torch.count_nonzero(rstd != rstd_of_zeros) == len(chosen)

    mask = 5 if x.dtype == r.dtype else 7
    rest = (w, EPS, 0.0, x.dtype, mask)
    few_grads = torch.ops.fused.add_rms_norm_backward(few_out, few_h, few_h, few_rstd, *rest)
    dx, dr, dg = torch.ops.fused.add_rms_norm_backward(out, h, h, rstd, *rest)  # gradients as good as any
    check(dx, few_grads[0])
    if dr is not None:
        check(dr, few_grads[1])
    torch.testing.assert_close(dg, few_grads[2])
    del out, h, dx, dr

    fused.add_rms_norm_(x, r, w, EPS)
    check(x, few_out)
    check(r, few_h)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("rows", [524289, 1048577])
def test_many_rows_of_4096(memory, rows, offset):
    memory(13 * rows * 4096 / 1e9)
    check_rows(rows, 4096, offset)


@pytest.mark.gpu
@pytest.mark.parametrize("elements", [2**31, 2**32])
@pytest.mark.parametrize("cols", [1, 72, 4097, 70_001, 300_001])
def test_any_path_past_32_bits(memory, cols, elements):
    """Unaligned rows: many to a block, one to a warp, a block, a cluster, and some that no registers hold."""
    memory(13 * elements / 1e9 + 8 * elements / cols / 1e9)
    check_rows(elements // cols + 3, cols, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
def test_an_fp32_residual_past_32_bits(memory, offset):
    memory(24 * 2**31 / 1e9)
    check_rows(2**31 // 4096 + 1, 4096, offset, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("extra", [8, 1], ids=["aligned", "unaligned"])
def test_one_row_of_more_than_32_bits(memory, extra):
    """Ones and a few twos: the mean of squares is 1, and bf16 does not see the difference."""
    cols = 2**31 + extra
    memory(24 * cols / 1e9)
    x = torch.ones(1, cols, dtype=torch.bfloat16, device="cuda")
    for col in (0, cols // 2, 2**31 - 1, 2**31, cols - 1):
        x[0, col] = 2
    out, rstd = torch.ops.fused.rms_norm_forward(x, None, EPS, 0.0, "fp32", None)
    torch.testing.assert_close(rstd, torch.ones_like(rstd), rtol=1e-5, atol=0)
    assert torch.equal(out, x)
    del out

    w = torch.ones(cols, dtype=torch.bfloat16, device="cuda")
    dx, _, dg = torch.ops.fused.add_rms_norm_backward(x, None, x, rstd, w, EPS, 0.0, x.dtype, 5)
    assert dx.abs_().max().item() < 1e-3  # x - x * mean(x^2)
    assert torch.equal(dg, x.square_()[0])


@pytest.mark.parametrize("extra", [0, 5], ids=["aligned", "unaligned"])
def test_strides_past_32_bits(device, memory, extra):
    """Three rows, 2^31 elements apart, of every tensor in one buffer, whose other pages are never touched."""
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
    forward = torch.ops.fused.add_rms_norm_forward
    expected = forward(dense["input"], dense["residual"], w, EPS, 0.0, "fp32", None)
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
