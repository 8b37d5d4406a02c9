"""Any H and any number of rows, forward and backward."""

from __future__ import annotations

import pytest
import torch
from reference import assert_rounds_to, backward, forward

import fused_add_rms_norm as fused

HIDDEN = [1, 2, 7, 8, 63, 64, 127, 128, 256, 257, 512, 576, 1536, 2880, 4096, 5120, 7168, 8191, 8192, 8200]
MIXED = torch.bfloat16, torch.float32
LONG = [12288, 16384, 32768, 65535, 65536, 65537, 131072, 262144, 262152, 300001]


def check(
    rows: int,
    cols: int,
    dtype: torch.dtype,
    device: str,
    residual_dtype: torch.dtype | None = None,
    *,
    with_dh: bool = True,
    wanted: int = 7,
) -> None:
    """wanted: output_mask, less the bit that equal dtypes do not have."""
    x, w = torch.randn(rows, cols, device=device).to(dtype), torch.randn(cols, device=device).to(dtype)
    r = torch.randn(rows, cols, device=device).to(residual_dtype or dtype)
    dy, dh = torch.randn_like(x), torch.randn_like(r) if with_dh else None
    exact = forward(x, r, w, 1e-6)
    out, h, rstd = torch.ops.fused.add_rms_norm_forward(x, r, w, 1e-6, 0.0, "fp32", None)
    assert_rounds_to(out, exact.out, "out")
    assert_rounds_to(rstd, exact.rstd, "rstd")
    assert torch.equal(h, exact.residual_out)
    mask = wanted & (5 if dtype == r.dtype else 7)
    grads = torch.ops.fused.add_rms_norm_backward(dy, dh, h, rstd, w, 1e-6, 0.0, dtype, mask)
    exact_grad = backward(dy, dh, h, rstd, w)
    of_input = exact_grad.grad_input, exact_grad.grad_input_error
    of_weight = exact_grad.grad_weight, exact_grad.grad_weight_error
    for bit, name, grad, (value, error) in zip(
        (1, 2, 4),
        ("grad_input", "grad_residual", "grad_weight"),
        grads,
        (of_input, of_input, of_weight),
        strict=True,
    ):
        assert (grad is not None) == bool(mask & bit), name
        if grad is not None:
            assert_rounds_to(grad, value, name, error=error)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("cols", HIDDEN)
def test_hidden_sizes(device, cols, dtype):
    check(3, cols, dtype, device)


@pytest.mark.parametrize("cols", [7, 64, 576, 4096, 5121])
def test_hidden_sizes_under_an_fp32_residual(device, cols):
    check(3, cols, torch.bfloat16, device, torch.float32)


@pytest.mark.parametrize("dtype, residual_dtype", [(torch.bfloat16, None), MIXED, (torch.float32, None)])
@pytest.mark.parametrize("cols", LONG)
def test_long_rows(device, cols, dtype, residual_dtype):
    check(2, cols, dtype, device, residual_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, residual_dtype",
    [*((d, None) for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)), MIXED],
)
@pytest.mark.parametrize("cols", [*HIDDEN, 1024, 2048, *LONG])
def test_enough_rows_for_every_multiprocessor(cols, dtype, residual_dtype):
    """Many rows take other configurations than few."""
    check(600, cols, dtype, "cuda", residual_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 3, 17, 264, 265, 1025, 4096, 100_000])
@pytest.mark.parametrize("cols", [64, 576, 4096])
def test_row_counts_on_the_gpu(rows, cols, residual_dtype):
    check(rows, cols, torch.bfloat16, "cuda", residual_dtype)


@pytest.mark.parametrize(
    "rows", [4, 20, *(pytest.param(n, marks=pytest.mark.gpu) for n in (64, 131, 132, 133))]
)
@pytest.mark.parametrize("cols", [577, 4097, 8192])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_about_as_many_rows_as_multiprocessors(device, rows, cols, dtypes):
    """Up to there, blocks of their own form grad_weight."""
    check(rows, cols, dtypes[0], device, dtypes[1])


@pytest.mark.parametrize("rows", [20, pytest.param(600, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("cols", [513, 1025, 1279, 1281, 4097, 5121, 16385])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), MIXED, (torch.float32,) * 2], ids=str)
@pytest.mark.parametrize("with_dh", [True, False])
@pytest.mark.parametrize("wanted", [7, 3, 4])
def test_a_warp_with_few_of_the_columns(device, rows, cols, dtypes, with_dh, wanted):
    """A row's last warp may have a single column, or as many as a vector a lane, or one more."""
    check(rows, cols, dtypes[0], device, dtypes[1], with_dh=with_dh, wanted=wanted)


@pytest.mark.parametrize("rows", [1, 2, 3, 1025, 4096, 100_000])
def test_row_counts(device, rows):
    check(rows, 24, torch.bfloat16, device)


@pytest.mark.parametrize("shape", [(0, 64), (4, 0, 64)])
def test_no_rows(device, shape):
    x = torch.empty(*shape, device=device, requires_grad=True)
    r = torch.empty(*shape, device=device, requires_grad=True)
    w = torch.ones(64, device=device, requires_grad=True)
    out, h = fused.add_rms_norm(x, r, w)
    assert out.shape == h.shape == shape
    (out.sum() + h.sum()).backward()
    assert x.grad.shape == r.grad.shape == shape
    assert torch.equal(w.grad, torch.zeros(64, device=device))
    with torch.no_grad():
        fused.add_rms_norm_(x, r, w)
        fused.add_rms_norm(x, r, w, out=(torch.empty_like(x), torch.empty_like(r)))
    assert fused.rms_norm(x, w).shape == shape
    if device == "cuda":  # a refused launch would show in the next operator
        torch.cuda.synchronize()
        assert torch.ones(2, device=device).sum().item() == 2
