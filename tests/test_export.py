"""torch.export and AOTInductor: the operators are nodes of a graph that runs elsewhere, or are decomposed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference import CASTING_MODES, DTYPES
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fused_add_rms_norm as fused

COLS = 32
ROWS = torch.export.Dim("rows", min=2, max=4096)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            fused.AddRMSNorm(COLS),
            fused.AddRMSNorm(COLS, offset=1.0, casting_mode="llama"),
        )
        self.linear = nn.Linear(COLS, COLS, bias=False)
        nn.init.normal_(self.second.weight)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        out, residual = self.first(input)
        return self.second(self.linear(out), residual)


class WithInPlace(Block):
    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        out, residual = super().forward(input)
        out = self.linear(out)
        fused.add_rms_norm_(out, residual, self.second.weight)
        return out, residual


def exported(block: nn.Module, device: str = "cpu") -> tuple[torch.export.ExportedProgram, Tensor]:
    input = torch.randn(6, COLS, device=device)
    with torch.no_grad():  # which the in-place form asks for, where weights require grad
        program = torch.export.export(block.to(device), (input,), dynamic_shapes={"input": {0: ROWS}})
    return program, torch.randn(11, COLS, device=device)


def targets(program: torch.export.ExportedProgram) -> list[str]:
    return [
        str(node.target).removesuffix(".default")
        for node in program.graph.nodes
        if node.op == "call_function"
    ]


def elsewhere(code: str, *args: Path | str) -> subprocess.CompletedProcess[str]:
    """In a process that has seen neither the model nor the compiler."""
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True)


def run_elsewhere(code: str, *args: Path | str) -> None:
    result = elsewhere(code, *args)
    assert result.returncode == 0, result.stderr


def test_the_operators_are_nodes_and_the_row_count_is_free(device):
    block = Block()
    program, input = exported(block, device)
    assert [t for t in targets(program) if "fused" in t] == ["fused.rms_norm", "fused.add_rms_norm"]
    with torch.no_grad():
        for actual, expected in zip(program.module()(input), block(input), strict=True):
            assert torch.equal(actual, expected)


def test_export_for_training(device):
    block = Block().to(device)
    input = torch.randn(6, COLS, device=device)
    trained = torch.export.export(block, (input,), dynamic_shapes={"input": {0: ROWS}}).module()
    input = torch.randn(11, COLS, device=device)
    expected = torch.autograd.grad(block(input)[0].square().sum(), list(block.parameters()))
    actual = torch.autograd.grad(trained(input)[0].square().sum(), list(trained.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_saved_and_run_in_another_process(tmp_path):
    block = Block()
    program, input = exported(block)
    torch.export.save(program, tmp_path / "block.pt2")
    with torch.no_grad():
        torch.save((input, block(input)), tmp_path / "expected.pt")
    run_elsewhere(
        "import sys, torch, fused_add_rms_norm\n"
        "program = torch.export.load(sys.argv[1]).module()\n"
        "input, expected = torch.load(sys.argv[2])\n"
        "assert all(map(torch.equal, program(input), expected))",
        tmp_path / "block.pt2",
        tmp_path / "expected.pt",
    )


def compiled_package(program: torch.export.ExportedProgram, path: Path) -> str:
    with torch.no_grad():
        return torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def torch_crashes_on_its_own(path: Path, device: str) -> bool:
    """Whether loading a package without an operator of ours crashes: with some compilers, on CUDA alone."""
    program = torch.export.export(nn.ReLU().to(device), (torch.randn(2, device=device),))
    load = "import sys, torch\ntorch._inductor.aoti_load_package(sys.argv[1])"
    return elsewhere(load, compiled_package(program, path)).returncode < 0


def test_aot_inductor_needs_the_library_alone(tmp_path, device):
    """The compiled model runs where there is no Python package, only the shared library."""
    block = WithInPlace()
    program, input = exported(block, device)
    package = compiled_package(program, tmp_path / "block.pt2")
    with torch.no_grad():
        torch.save((input, block(input)), tmp_path / "expected.pt")
    from fused_add_rms_norm import _C

    result = elsewhere(
        "import sys, torch\n"
        "torch.ops.load_library(sys.argv[1])\n"
        "print('library loaded', flush=True)\n"
        "model = torch._inductor.aoti_load_package(sys.argv[2])\n"
        "input, expected = torch.load(sys.argv[3])\n"
        "assert all(map(torch.equal, model(input), expected))\n"
        "assert 'fused_add_rms_norm' not in sys.modules",
        _C.__file__,
        package,
        tmp_path / "expected.pt",
    )
    assert "library loaded" in result.stdout, result.stderr
    if result.returncode < 0 and torch_crashes_on_its_own(tmp_path / "control.pt2", device):
        pytest.skip("torch crashes on a package of its own operators here too")
    assert result.returncode == 0, result.stderr


def test_decomposed_graph_is_plain_aten(device):
    block = Block()
    program, input = exported(block, device)
    plain = program.run_decompositions(fused.decompose_table())
    assert all(target.startswith(("aten.", "<built-in")) for target in targets(plain)), targets(plain)
    assert any("rsqrt" in target for target in targets(plain))
    with torch.no_grad():
        torch.testing.assert_close(plain.module()(input), block(input))


def formula_and_kernel(
    op: torch._ops.OpOverload, *args: object, **kwargs: object
) -> tuple[list[Tensor], list[Tensor]]:
    """What the decomposition computes, traced with it, and what the operator does."""

    def call(*tensors: Tensor) -> list[Tensor | None]:
        values = iter(tensors)
        results = op(*(next(values) if isinstance(a, Tensor) else a for a in args), **kwargs)
        return list(results) if isinstance(results, tuple) else [results]

    tensors = [a for a in args if isinstance(a, Tensor)]
    graph = make_fx(call, decomposition_table=fused.decompose_table())(*tensors)
    assert not any("fused" in str(node.target) for node in graph.graph.nodes)
    return graph(*tensors), call(*tensors)


@pytest.mark.parametrize("casting_mode", CASTING_MODES)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_decompositions_round_as_the_kernels(device, dtypes, casting_mode):
    """Same strides, dtypes, roundings: only the order of a sum differs, so few results round another way."""
    x, r = (torch.randn(3, 4, 64, device=device).to(dtype).transpose(0, 1) for dtype in dtypes[:2])
    w = torch.randn(64, device=device).to(dtypes[0])
    ops, (out_dtype, mask) = torch.ops.fused, (dtypes[2], 5 if x.dtype == r.dtype else 7)
    out, h, rstd = ops.add_rms_norm_forward(x, r, w, 1e-5, 1.0, casting_mode, out_dtype)
    dy, dh = torch.randn_like(out), torch.randn_like(h)
    options = {"offset": 1.0, "casting_mode": casting_mode}
    for actual, expected in (
        formula_and_kernel(ops.add_rms_norm.default, x, r, w, 1e-5, **options, out_dtype=out_dtype),
        formula_and_kernel(ops.rms_norm.default, x, w, 1e-5, **options),
        formula_and_kernel(ops.rms_norm.default, x),
        formula_and_kernel(ops.add_rms_norm_forward.default, x, r, w, 1e-5, 1.0, casting_mode, out_dtype),
        formula_and_kernel(ops.rms_norm_forward.default, x, w, 1e-5, 1.0, casting_mode, None),
        formula_and_kernel(ops.add_rms_norm_backward.default, dy, dh, h, rstd, w, 1e-5, 1.0, x.dtype, mask),
        formula_and_kernel(ops.add_rms_norm_backward.default, dy, None, h, rstd, None, 1e-5, 1.0, x.dtype, 1),
    ):
        assert len(actual) == len(expected)
        for a, b in zip(actual, expected, strict=True):
            assert (a is None) == (b is None)
            if a is None:
                continue
            assert a.dtype == b.dtype and a.stride() == b.stride()
            torch.testing.assert_close(a, b)
            if a.dtype.itemsize == 2:
                assert (a != b).float().mean() < 0.02
