"""Strides, offsets and addresses: every tensor has its own, and none changes a bit of the result."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fused_add_rms_norm as fused

SENTINEL = 12345.0  # exact in every dtype but bf16 and fp16, where its rounding is as good


def placed(values: Tensor, *, offset: int = 0, pad: int = 0) -> Tensor:
    """The matrix in a larger buffer of sentinels, `offset` elements in, with `pad` elements between rows."""
    rows, cols = values.shape
    buffer = torch.full(
        (offset + rows * (cols + pad) + 64,), SENTINEL, dtype=values.dtype, device=values.device
    )
    view = buffer.as_strided((rows, cols), (cols + pad, 1), offset)
    view.copy_(values)
    return view


def assert_only_rows_written(view: Tensor) -> None:
    """The buffer around a view made by `placed` still holds its sentinels."""
    buffer = view.as_strided((view.untyped_storage().nbytes() // view.element_size(),), (1,), 0).clone()
    buffer.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(SENTINEL)
    assert torch.equal(buffer, torch.full_like(buffer, SENTINEL)), "written outside the rows"


def problem(
    cols: int, dtype: torch.dtype, device: str, residual_dtype: torch.dtype | None = None, rows: int = 5
) -> tuple[Tensor, ...]:
    x, w = torch.randn(rows, cols, device=device).to(dtype), torch.randn(cols, device=device).to(dtype)
    return x, torch.randn(rows, cols, device=device).to(residual_dtype or dtype), w


def sizes(cols: list[int], *others: tuple[int, int], gpu: list[tuple[int, int]]) -> list[Any]:
    """(rows, cols): five rows, and numbers of them that take other kernels, on a GPU or emulated."""
    return [*((5, n) for n in cols), *others, *(pytest.param(*size, marks=pytest.mark.gpu) for size in gpu)]


PLACES = [{"offset": 1}, {"offset": 3, "pad": 1}, {"pad": 8}, {"pad": 3}, {"offset": 8, "pad": 16}]


@pytest.mark.parametrize("cols", [7, 64, 257, 576, 1200, 4096, 4097, 8191, 20001])
@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16,) * 2, (torch.float32,) * 2, (torch.bfloat16, torch.float32)], ids=str
)
def test_each_tensor_at_an_odd_place_in_turn(device, cols, dtypes):
    x, r, w = problem(cols, dtypes[0], device, dtypes[1])
    expected, expected_h = fused.add_rms_norm(x, r, w)
    for place, moved in itertools.product(PLACES, range(5)):
        args = [placed(t, **place) if i == moved else t for i, t in enumerate((x, r))]
        weight = torch.cat([w[:1], w])[1:] if moved == 2 else w
        outs = [
            placed(torch.zeros_like(t), **place) if i == moved else torch.empty_like(t)
            for i, t in enumerate((x, r), 3)
        ]
        out, h = fused.add_rms_norm(*args, weight, out=tuple(outs))
        assert torch.equal(out, expected) and torch.equal(h, expected_h), (place, moved)
        if moved >= 3:
            assert_only_rows_written(outs[moved - 3])
        out, h = fused.add_rms_norm(*args, weight)
        assert torch.equal(out, expected) and torch.equal(h, expected_h), (place, moved)


@pytest.mark.parametrize(
    ("rows", "cols"),
    sizes([7, 64, 257, 1200, 4096, 4097], (20, 1200), (20, 4097), gpu=[(600, 1200), (600, 4097)]),
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_place_through_its_own_strides(device, rows, cols, dtype):
    x, r, w = problem(cols, dtype, device, rows=rows)
    expected, expected_h = fused.add_rms_norm(x, r, w)
    for x_place, r_place in itertools.product(PLACES, PLACES):
        out, h = placed(x, **x_place), placed(r, **r_place)
        fused.add_rms_norm_(out, h, w)
        assert torch.equal(out, expected) and torch.equal(h, expected_h), (x_place, r_place)
        assert_only_rows_written(out)
        assert_only_rows_written(h)


@pytest.mark.parametrize(
    ("rows", "cols"),
    sizes([7, 257, 1200, 4096, 4097, 12295], (3, 1200), (3, 4097), gpu=[(100, 1200), (100, 4097)]),
)
@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16,) * 2, (torch.float32,) * 2, (torch.bfloat16, torch.float32)], ids=str
)
def test_gradients_at_odd_places(device, rows, cols, dtypes):
    """grad_weight adds rows in its own order on each kernel path; grad_input may not differ by a bit."""
    x, r, w = problem(cols, dtypes[0], device, dtypes[1], rows=rows)
    _, h, rstd = torch.ops.fused.add_rms_norm_forward(x, r, w, 1e-6, 0.0, "fp32", None)
    dy, dh = torch.randn_like(x), torch.randn_like(r)
    mask = 5 if x.dtype == r.dtype else 7

    def backward(dy: Tensor, dh: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.fused.add_rms_norm_backward(dy, dh, h, rstd, w, 1e-6, 0.0, x.dtype, mask)

    expected = backward(dy, dh, h)
    for place, moved in itertools.product(PLACES, range(3)):
        actual = backward(*(placed(t, **place) if i == moved else t for i, t in enumerate((dy, dh, h))))
        assert torch.equal(actual[0], expected[0]), (place, moved)
        assert actual[1] is expected[1] is None or torch.equal(actual[1], expected[1]), (place, moved)
        torch.testing.assert_close(actual[2], expected[2])


def split_heads(t: Tensor) -> Tensor:
    """Heads cut out of a fused projection: rows whose leading dimensions do not fold into one stride."""
    return t.view(6, -1)[:, 16:144].view(6, 4, 32)


VIEWS = {
    "transposed": lambda t: t.view(24, 16).t(),  # the last dimension is not dense
    "column slice": lambda t: t.view(8, 48)[:, 8:40],
    "row slice": lambda t: t.view(4, 6, 16)[:, :3],
    "swapped leading dimensions": lambda t: t.view(4, 6, 16).transpose(0, 1),
    "every second": lambda t: t.view(12, 32)[::2],
    "every second column": lambda t: t.view(12, 32)[:, ::2],
    "expanded rows": lambda t: t[:32].expand(5, 32),
    "expanded columns": lambda t: t[:6].view(6, 1).expand(6, 32),
    "four levels": lambda t: t.view(2, 3, 4, 2, 8).permute(2, 1, 0, 3, 4)[:, ::2],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("r_view", VIEWS)
@pytest.mark.parametrize("x_view", VIEWS)
def test_views_equal_their_contiguous_copies(device, x_view, r_view, dtype):
    x = VIEWS[x_view](torch.randn(384, device=device).to(dtype))
    r = VIEWS[r_view](torch.randn(384, device=device).to(dtype))
    if x.shape != r.shape:
        r = x.new_empty(384).normal_()
        r = torch.as_strided(r, x.shape, x.contiguous().stride())
    w = torch.randn(x.shape[-1], device=device).to(dtype)
    expected = fused.add_rms_norm(x.contiguous(), r.contiguous(), w)
    actual = fused.add_rms_norm(x, r, w)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b) and a.is_contiguous()


def test_heads_of_a_fused_projection(device):
    qkv = torch.randn(6, 4096, device=device).to(torch.bfloat16)
    q, k, _ = qkv.split([2048, 1024, 1024], -1)
    w = torch.randn(128, device=device).to(torch.bfloat16)
    for heads in (q.view(6, 16, 128), k.view(6, 8, 128)):
        assert torch.equal(fused.rms_norm(heads, w), fused.rms_norm(heads.contiguous(), w))


def test_in_place_follows_two_levels_of_strides(device):
    x, r = torch.randn(4, 6, 16, device=device), torch.randn(4, 7, 16, device=device)
    w = torch.randn(16, device=device)
    expected = fused.add_rms_norm(x[:, :3].contiguous(), r[:, :3].contiguous(), w)
    untouched = x[:, 3:].clone(), r[:, 3:].clone()
    fused.add_rms_norm_(x[:, :3], r[:, :3], w)
    assert torch.equal(x[:, :3], expected[0]) and torch.equal(r[:, :3], expected[1])
    assert torch.equal(x[:, 3:], untouched[0]) and torch.equal(r[:, 3:], untouched[1])


def test_gradients_that_arrive_expanded_transposed_or_sliced(device):
    x, r = (torch.randn(6, 4, 32, device=device, requires_grad=True) for _ in range(2))
    w = torch.randn(32, device=device, requires_grad=True)
    buffer = torch.randn(6, 4, 64, device=device)
    grads = {
        "expanded": torch.ones((), device=device).expand(6, 4, 32),
        "expanded rows": torch.randn(32, device=device).expand(6, 4, 32),
        "transposed": torch.randn(4, 6, 32, device=device).transpose(0, 1),
        "columns transposed": torch.randn(6, 32, 4, device=device).transpose(1, 2),
        "sliced": buffer[..., 16:48],
        "every second": buffer[..., ::2],
    }
    out, h = fused.add_rms_norm(x, r, w)
    for (_, dy), (_, dh) in itertools.product(grads.items(), grads.items()):
        actual = torch.autograd.grad((out, h), (x, r, w), (dy, dh), retain_graph=True)
        expected = torch.autograd.grad(
            (out, h), (x, r, w), (dy.contiguous(), dh.contiguous()), retain_graph=True
        )
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_strided_weight(device):
    x, r, w = (
        torch.randn(4, 32, device=device),
        torch.randn(4, 32, device=device),
        torch.randn(64, device=device)[::2],
    )
    assert torch.equal(fused.add_rms_norm(x, r, w)[0], fused.add_rms_norm(x, r, w.contiguous())[0])
    w = torch.randn(1, device=device).expand(32).requires_grad_()
    fused.add_rms_norm(x, r, w)[0].sum().backward()
    assert w.grad.shape == (32,)
