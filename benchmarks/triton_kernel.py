"""The kernel most people would write: residual add and RMSNorm in Triton, one program a row. And a plain
copy, as a ceiling.

``single pass`` keeps the row in registers: four tensors' worth of traffic, and spills when a row is long.
``two pass`` walks the row in blocks and reads both inputs again for the second walk, so any length fits;
neither result is stored before that walk, so both passes see the inputs also where the results go over them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST_SINGLE_PASS = 32768  # 32 fp32 values a thread at 1024 threads; twice that spills


@triton.jit
def _sum(input, residual, columns, mask):  # type: ignore[no-untyped-def]
    x = tl.load(input + columns, mask=mask, other=0.0).to(tl.float32)
    return x + tl.load(residual + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(out, residual_out, weight, columns, mask, h, rstd):  # type: ignore[no-untyped-def]
    w = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(residual_out + columns, h, mask=mask)
    tl.store(out + columns, h * rstd * w, mask=mask)


@triton.jit
def _add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    input,
    residual,
    weight,
    out,
    residual_out,
    rstd_out,
    input_stride,
    residual_stride,
    out_stride,
    residual_out_stride,
    eps,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    TWO_PASS: tl.constexpr,
    STORE_RSTD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    input += row * input_stride
    residual += row * residual_stride
    out += row * out_stride
    residual_out += row * residual_out_stride
    columns = tl.arange(0, BLOCK)

    if TWO_PASS:
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, COLS, BLOCK):
            h = _sum(input, residual, start + columns, start + columns < COLS)
            squares += h * h
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / COLS + eps)
        for start in range(0, COLS, BLOCK):
            h = _sum(input, residual, start + columns, start + columns < COLS)
            _store(out, residual_out, weight, start + columns, start + columns < COLS, h, rstd)
    else:
        h = _sum(input, residual, columns, columns < COLS)
        rstd = tl.rsqrt(tl.sum(h * h, axis=0) / COLS + eps)
        _store(out, residual_out, weight, columns, columns < COLS, h, rstd)

    if STORE_RSTD:
        tl.store(rstd_out + row, rstd)


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    in_place: bool = False,
    two_pass: bool | None = None,
    return_rstd: bool = False,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """The project's contract, in fp32 and with one rounding at each store.

    Args:
        input, residual: (rows, cols) with a dense last dimension; each has its own row stride and dtype.
        weight: (cols,), dense.
        in_place: the results replace input and residual.
        two_pass: whether to walk the row twice; ``None`` does so where it is too long for registers.
        return_rstd: return the fp32 reciprocal root as well.

    Returns:
        (out, residual_out), in the dtypes of input and residual, and rstd where it is asked for.
    """
    rows, cols = input.shape
    two_pass = cols > LONGEST_SINGLE_PASS if two_pass is None else two_pass
    block = min(triton.next_power_of_2(cols), 8192) if two_pass else triton.next_power_of_2(cols)
    out = input if in_place else torch.empty((rows, cols), dtype=input.dtype, device=input.device)
    residual_out = (
        residual if in_place else torch.empty((rows, cols), dtype=residual.dtype, device=input.device)
    )
    rstd = torch.empty(rows if return_rstd else 0, dtype=torch.float32, device=input.device)
    if rows:
        _add_rms_norm_kernel[(rows,)](
            input,
            residual,
            weight,
            out,
            residual_out,
            rstd,
            input.stride(0),
            residual.stride(0),
            out.stride(0),
            residual_out.stride(0),
            eps,
            COLS=cols,
            BLOCK=block,
            TWO_PASS=two_pass,
            STORE_RSTD=return_rstd,
            num_warps=min(max(block // 512, 1), 32),  # 16 elements a thread, up to 1024 threads
        )
    return (out, residual_out, rstd) if return_rstd else (out, residual_out)


@triton.jit
def _copy_kernel(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + columns, tl.load(source + columns, mask=columns < count), mask=columns < count)


def copy(source: Tensor, target: Tensor) -> None:
    """Copies one dense tensor over another of the same size and dtype, four bytes an element."""
    block = 1024  # 4 KiB: two 16-byte vectors a thread
    count = source.numel()
    _copy_kernel[(triton.cdiv(count, block),)](source, target, count, BLOCK=block)
