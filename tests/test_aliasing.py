"""Which tensors may share memory, and that the others are refused before a byte is written."""

from __future__ import annotations

import itertools

import pytest
import torch

import fused_add_rms_norm as fused

ROWS, COLS = 6, 96


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def tensors(request, device):
    return tuple(torch.randn(n, COLS, device=device).to(request.param) for n in (ROWS, ROWS, 1))


@pytest.mark.parametrize(
    ("rows", "cols"), [(6, 96), (20, 1200), pytest.param(600, 1200, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("out_is", ["input", "residual", "fresh"])
@pytest.mark.parametrize("residual_out_is", ["input", "residual", "fresh"])
def test_each_result_may_be_exactly_input_or_residual(device, out_is, residual_out_is, rows, cols):
    """Aligned, and one element off."""
    if out_is == residual_out_is != "fresh":
        pytest.skip("both results in one place: refused, see below")
    w = torch.randn(cols, device=device)
    for dtype, offset in itertools.product((torch.bfloat16, torch.float32), (0, 1)):
        x, r = (
            torch.randn(rows * cols + 1, device=device).to(dtype)[offset:][: rows * cols] for _ in range(2)
        )
        x, r = x.view(rows, cols), r.view(rows, cols)
        expected = fused.add_rms_norm(x, r, w.to(dtype))
        places = {"input": x, "residual": r}
        out, h = (places.get(where, torch.empty_like(x)) for where in (out_is, residual_out_is))
        fused.add_rms_norm(x, r, w.to(dtype), out=(out, h))
        assert torch.equal(out, expected[0]) and torch.equal(h, expected[1]), (dtype, offset)


def test_the_functional_form_may_add_a_tensor_to_itself(tensors):
    x, _, w = tensors
    out, h = fused.add_rms_norm(x, x, w[0])
    assert torch.equal(h, x + x) and torch.equal(out, fused.add_rms_norm(x, x.clone(), w[0])[0])


def overlapping(device: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Pairs (input, residual) that share elements."""
    buffer = torch.randn(8 * 100, device=device)
    rows = buffer.view(8, 100)
    return {
        "the same": (rows[:, :COLS], rows[:, :COLS]),
        "a row further": (rows[:ROWS, :COLS], rows[1 : ROWS + 1, :COLS]),
        "an element further": (
            buffer[: ROWS * COLS].view(ROWS, COLS),
            buffer[1 : ROWS * COLS + 1].view(ROWS, COLS),
        ),
        "columns that meet": (rows[:, :50], rows[:, 49:99]),
        "rows of other strides": (rows[:4, :40], buffer[200:360].view(4, 40)),
    }


@pytest.mark.parametrize("name", overlapping("cpu"))
def test_in_place_refuses_tensors_that_overlap(device, name):
    x, r = overlapping(device)[name]
    before = x.clone(), r.clone()
    with pytest.raises(RuntimeError, match="expected input and residual not to overlap"):
        fused.add_rms_norm_(x, r)
    assert torch.equal(x, before[0]) and torch.equal(r, before[1])


@pytest.mark.parametrize("name", [n for n in overlapping("cpu") if n != "the same"])
@pytest.mark.parametrize("result", ["out", "residual_out"])
@pytest.mark.parametrize("argument", ["input", "residual"])
def test_out_refuses_partial_overlap(device, name, result, argument):
    argument_tensor, result_tensor = overlapping(device)[name]
    before = argument_tensor.clone()
    tensors = {key: torch.randn_like(argument_tensor) for key in ("input", "residual", "out", "residual_out")}
    tensors[argument], tensors[result] = argument_tensor, result_tensor
    with pytest.raises(RuntimeError, match=f"expected {result} and {argument} not to overlap"):
        torch.ops.fused.add_rms_norm_out(**tensors)
    assert torch.equal(argument_tensor, before)


def test_out_refuses_results_in_one_place(device):
    x, r = torch.randn(2, 8, device=device), torch.randn(2, 8, device=device)
    for both in (x, r, torch.empty_like(x)):
        with pytest.raises(RuntimeError, match="expected out and residual_out not to overlap"):
            fused.add_rms_norm(x, r, out=(both, both))


def test_results_over_the_weight_are_refused(device):
    buffer = torch.randn(3, 8, device=device)
    with pytest.raises(RuntimeError, match="expected out and weight not to overlap"):
        fused.add_rms_norm_(buffer[:2], torch.randn(2, 8, device=device), buffer[1])


def test_a_strided_weight_overlaps_only_where_it_lies(device):
    buffer = torch.randn(4, 8, device=device)
    with pytest.raises(RuntimeError, match="expected out and weight not to overlap"):
        fused.add_rms_norm_(buffer[:2], torch.randn(2, 8, device=device), buffer[0, :1].expand(8))
    weight, out = buffer.view(-1)[0:16:2], buffer.view(-1)[15:31].view(2, 8)  # ends where out begins
    x, r, w = torch.randn(2, 8, device=device), torch.randn(2, 8, device=device), weight.clone()
    fused.add_rms_norm(x, r, weight, out=(out, torch.empty_like(r)))
    assert torch.equal(out, fused.add_rms_norm(x, r, w)[0])


def test_rows_that_share_memory_are_refused_as_results(device):
    x, r = torch.randn(4, 8, device=device), torch.randn(8, device=device).expand(4, 8)
    with pytest.raises(RuntimeError, match="expected rows that do not share memory"):
        fused.add_rms_norm_(x, r)
    sliding = torch.randn(20, device=device).as_strided((4, 8), (4, 1))
    with pytest.raises(RuntimeError, match="expected rows that do not share memory"):
        fused.add_rms_norm_(sliding, x)


def test_neighbours_in_one_buffer_do_not_overlap(device):
    """Columns side by side, halves and interleaved rows share a buffer and no element."""
    qk = torch.randn(6, 2, 40, device=device)
    pairs = [
        (qk[:, 0], qk[:, 1]),
        (qk[:3, 0], qk[3:, 0]),
        (qk[::2, 0], qk[1::2, 0]),
        (qk[:, :, :20], qk[:, :, 20:]),
    ]
    for x, r in pairs:
        expected = fused.add_rms_norm(x.clone(), r.clone())
        fused.add_rms_norm_(x, r)
        assert torch.equal(x, expected[0]) and torch.equal(r, expected[1])


def test_in_place_refuses_what_it_cannot_write_through(device):
    """A copy would lose the result."""
    columns = torch.randn(8, 16, device=device).t()
    deep = torch.randn(2, 3, 4, 2, 8, device=device).permute(2, 1, 0, 3, 4)[:, ::2]
    for x in (columns, deep):
        for args in ((x, torch.randn_like(x)), (torch.randn_like(x), x)):
            before = x.clone()
            with pytest.raises(RuntimeError, match="expected tensors with a dense last dimension"):
                fused.add_rms_norm_(*args)
            assert torch.equal(x, before)
