"""torch.compile: one graph, eager's bits, no recompilation, no copies."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from reference import CASTING_MODES
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import fused_add_rms_norm as fused

COLS, LAYERS = 32, 4


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Nothing compiled before, in this process or another, stands in for what a test compiles."""
    torch.compiler.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield
    torch.compiler.reset()


class Stack(nn.Module):
    """Layers as in a model: linear layers on the normalised values, sums on the residual stream."""

    def __init__(self, in_place: bool, dtype: torch.dtype, casting_mode: str = "fp32"):
        super().__init__()
        self.in_place = in_place
        self.norms = nn.ModuleList(
            fused.AddRMSNorm(COLS, casting_mode=casting_mode, dtype=dtype) for _ in range(LAYERS)
        )
        self.linears = nn.ModuleList(nn.Linear(COLS, COLS, bias=False, dtype=dtype) for _ in range(LAYERS))

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            input = linear(input)
            if self.in_place:
                fused.add_rms_norm_(input, residual, norm.weight, norm.eps, casting_mode=norm.casting_mode)
            else:
                input, residual = norm(input, residual)
        return input, residual


def inputs(device: str, dtype: torch.dtype, rows: int = 6) -> list[Tensor]:
    return [torch.randn(rows, COLS, device=device).to(dtype) for _ in range(2)]


def calls(code: str) -> Counter[str]:
    """How often generated code calls each of our operators, and how often it copies."""
    count = Counter(
        {name: code.count(f"fused.{name}.default(") for name in ("add_rms_norm", "add_rms_norm_")}
    )
    count["copies"] = code.count("copy_") + code.count("clone")
    return +count


def forward_and_backward(model: nn.Module, call, *args: Tensor) -> list[Tensor]:
    leaves = [arg.clone().requires_grad_() for arg in args]
    out, residual = call(*leaves)
    loss = (
        out.float() * torch.linspace(-1, 1, COLS, device=out.device)
    ).sum() + residual.float().square().sum()
    return [out, residual, *torch.autograd.grad(loss, [*leaves, *model.parameters()])]


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, b), f"result {index} differs from eager's by {(a - b).abs().max()}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("casting_mode", CASTING_MODES)
def test_training_step_is_one_graph_with_eagers_bits(device, casting_mode, dtype):
    model = Stack(False, dtype, casting_mode).to(device)
    compiled = torch.compile(model, fullgraph=True)
    args = inputs(device, dtype)
    assert_same_bits(forward_and_backward(model, compiled, *args), forward_and_backward(model, model, *args))


def test_no_recompilation_over_a_sweep_of_row_counts(device):
    model = Stack(False, torch.float32).to(device)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    forward_and_backward(model, compiled, *inputs(device, torch.float32))
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (2, 3, 7, 8, 16, 129, 1000):
            args = inputs(device, torch.float32, rows)
            assert_same_bits(
                forward_and_backward(model, compiled, *args), forward_and_backward(model, model, *args)
            )


def test_sizes_become_dynamic_of_themselves(device):
    """One recompilation when the row count first changes, none after."""
    compiled = torch.compile(lambda *args: fused.add_rms_norm(*args), fullgraph=True, backend="eager")
    for rows in (5, 6):
        compiled(*inputs(device, torch.float32, rows))
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (7, 64, 1000):
            compiled(*inputs(device, torch.float32, rows))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_inference_of_a_stack_has_no_copies(device, in_place, dynamic):
    model = Stack(in_place, torch.float32).to(device)
    args, expected_args = inputs(device, torch.float32), inputs(device, torch.float32)
    for arg, other in zip(args, expected_args, strict=True):
        other.copy_(arg)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
        actual, code = run_and_get_code(compiled, *args)
        expected = model(*expected_args)
    assert_same_bits([*actual, *args], [*expected, *expected_args])
    assert len(code) == 1
    assert calls(code[0]) == {"add_rms_norm_" if in_place else "add_rms_norm": LAYERS}


def test_a_copy_that_is_needed_is_seen_by_the_test_above(device):
    def returns_what_it_overwrites(input: Tensor, residual: Tensor) -> Tensor:
        before = residual.clone()
        fused.add_rms_norm_(input, residual)
        return before

    with torch.no_grad():
        _, code = run_and_get_code(torch.compile(returns_what_it_overwrites), *inputs(device, torch.float32))
    assert calls(code[0])["copies"] > 0


def test_arguments_are_passed_on_as_they_are(device):
    """In the strides that they have, and without defaults, which take the host time in every call."""

    def transposed(input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return fused.add_rms_norm(input.transpose(0, 1) + 1, residual)

    input, residual = torch.randn(5, 6, COLS, device=device), torch.randn(6, 5, COLS, device=device)
    with torch.no_grad():
        actual, code = run_and_get_code(torch.compile(transposed), input, residual)
        assert_same_bits(actual, transposed(input, residual))
    assert calls(code[0]) == {"add_rms_norm": 1}
    assert "offset=0.0" not in code[0] and "out_dtype=" not in code[0]


def test_out_form(device):
    def f(input: Tensor, residual: Tensor) -> Tensor:
        out = torch.empty_like(input)
        fused.add_rms_norm(input, residual, out=(out, residual))
        return out + 1

    args = inputs(device, torch.float32)
    expected, expected_residual = fused.add_rms_norm(*args)
    assert torch.equal(torch.compile(f, fullgraph=True)(*args), expected + 1)
    assert torch.equal(args[1], expected_residual)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_functorch_transforms_inside(device, transform):
    x, r = inputs(device, torch.float32)

    def f(x: Tensor, r: Tensor) -> Tensor:
        if transform == "vmap":
            return torch.vmap(lambda x, r: fused.add_rms_norm(x, r)[0])(x, r)
        if transform == "grad":
            return torch.func.grad(lambda x: fused.add_rms_norm(x, r)[0].square().sum())(x)
        return torch.func.jvp(lambda x: fused.add_rms_norm(x, r)[0], (x,), (r,))[1]

    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(x, r), f(x, r))


def test_compiled_autograd(device):
    norm = fused.AddRMSNorm(COLS, device=device)
    args = inputs(device, torch.float32)
    expected = forward_and_backward(norm, norm, *args)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        assert_same_bits(forward_and_backward(norm, norm, *args), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_overhead(in_place):
    """CUDA graphs replay with new values in the same memory."""
    model = Stack(in_place, torch.bfloat16).cuda()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            args = inputs("cuda", torch.bfloat16)
            expected = model(*(arg.clone() for arg in args))
            torch.compiler.cudagraph_mark_step_begin()
            assert_same_bits([t.clone() for t in compiled(*args)], list(expected))
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    assert in_place or skipped == 0  # torch makes no graph of a model that overwrites an argument of its own


@pytest.mark.gpu
def test_reduce_overhead_in_training():
    model = Stack(False, torch.bfloat16).cuda()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        args = inputs("cuda", torch.bfloat16)
        expected = forward_and_backward(model, model, *args)
        torch.compiler.cudagraph_mark_step_begin()
        assert_same_bits(forward_and_backward(model, compiled, *args), expected)


@pytest.mark.gpu
def test_in_place_stack_peaks_no_higher_than_eager():
    model = Stack(True, torch.bfloat16).cuda()
    compiled = torch.compile(model, fullgraph=True)

    def peak(call) -> int:
        args = inputs("cuda", torch.bfloat16, rows=1 << 16)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(*args)
        return torch.cuda.max_memory_allocated() - before

    with torch.no_grad():
        peak(compiled), peak(model)  # compiles; allocates workspaces
        assert peak(compiled) <= peak(model)
