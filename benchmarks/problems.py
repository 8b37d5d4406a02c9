"""What is measured: the shapes, their tensors, the bytes they move, and the fp64 answer they must give."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-6
ELEMENTS = 2**26  # 128 MiB a tensor in 16 bits: past any L2, and one launch runs for 100 us and more
WIDE = (512, 1024, 2048, 4096, 5120, 8192, 16384, 32768, 65536, 131072)

# name: dtypes of input, residual, weight
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32, torch.float32),
    "mixed": (torch.bfloat16, torch.float32, torch.float32),
}

# Relative error (in the 2-norm) above which a result is called wrong: a few roundings of the coarsest dtype
# in it. Loose on purpose, since each peer rounds in places of its own.
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}


@dataclass(frozen=True)
class Case:
    """One shape. ``peers``: whether providers that compile for each shape, for seconds, take part."""

    rows: int
    cols: int
    dtype: str = "bf16"
    layout: str = "dense"
    peers: bool = True

    @property
    def name(self) -> str:
        return f"{self.rows} x {self.cols} {self.dtype}" + (
            f" {self.layout}" if self.layout != "dense" else ""
        )

    @property
    def facts(self) -> dict[str, object]:
        return {"rows": self.rows, "cols": self.cols, "dtype": self.dtype, "layout": self.layout}


def sweep(dtype: str, peers: bool) -> list[Case]:
    """2^26 elements at every width, and the square most papers show."""
    return [Case(ELEMENTS // cols, cols, dtype, peers=peers) for cols in WIDE] + [
        Case(4096, 4096, dtype, peers=peers)
    ]


# Rows that 16-byte vectors do not fit, rows that are not neighbours, many short rows.
ODD = [Case(16384, 4097), Case(16384, 5121), Case(8192, 8191)]
ARRANGED = [Case(16384, 4096, layout=layout) for layout in ("strided", "misaligned", "odd-stride")]
SHORT = [Case(1048576, 64), Case(524288, 128)]
# The other dtypes meet the peers at one shape, and the whole sweep without those that compile.
DTYPE_CASES = [Case(16384, 4096, dtype) for dtype in ("fp16", "fp32", "mixed")]
DTYPE_SWEEPS = [
    case
    for dtype in ("fp16", "fp32", "mixed")
    for case in sweep(dtype, peers=False)
    if (case.rows, case.cols) != (16384, 4096)
]

FORWARD = [*sweep("bf16", peers=True), *DTYPE_CASES, *ODD, *ARRANGED, *SHORT, *DTYPE_SWEEPS]
BACKWARD = [*sweep("bf16", peers=True), *DTYPE_CASES, *ODD[:2], *ARRANGED, *DTYPE_SWEEPS]
DECODE = [Case(rows, cols) for cols in (4096, 2048, 8192, 16384) for rows in (1, 16, 64, 256)]
DECODE_BACKWARD = [Case(rows, 4096) for rows in (1, 8, 64)]
HOST = [Case(1, 4096)]
CPU = [Case(2048, 4096, dtype) for dtype in ("fp32", "bf16")]
TIMERS = [Case(16384, 4096)]
MEMORY = [Case(4096, 4096), Case(64, 4096), Case(4096, 16384)]


def arranged(tensor: Tensor, layout: str) -> Tensor:
    """A copy of a (rows, cols) tensor whose memory is laid out as ``layout`` says."""
    rows, cols = tensor.shape
    if layout == "dense":
        return tensor.clone(memory_format=torch.contiguous_format)
    if layout == "misaligned":  # every row starts one element after a 16-byte boundary
        return tensor.new_empty(rows * cols + 1)[1:].view(rows, cols).copy_(tensor)
    # "strided": every other row of a buffer; "odd-stride": no two neighbouring rows start on the same
    # boundary
    stride = {"strided": 2 * cols, "odd-stride": cols + 1}[layout]
    return tensor.new_empty(rows, stride)[:, :cols].copy_(tensor)


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the elements of these tensors, a tensor named twice counted once."""
    return sum(
        {
            (t.data_ptr(), t.shape, t.dtype): t.numel() * t.element_size() for t in tensors if t is not None
        }.values()
    )


class Problem:
    """The tensors of one case: random values, weights too. The layout is that of ``input``, ``grad_out`` and
    ``grad_residual_out``."""

    def __init__(self, case: Case, device: torch.device | str, seed: int = 0) -> None:
        self.case = case
        generator = torch.Generator(device).manual_seed(seed)
        input_dtype, residual_dtype, weight_dtype = DTYPES[case.dtype]

        def random(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype, generator=generator)

        shape = (case.rows, case.cols)
        self.input = arranged(random(*shape, dtype=input_dtype), case.layout)
        self.residual = random(*shape, dtype=residual_dtype)
        self.weight = random(case.cols, dtype=weight_dtype)
        self.grad_out = arranged(random(*shape, dtype=input_dtype), case.layout)
        self.grad_residual_out = arranged(random(*shape, dtype=residual_dtype), case.layout)

    def copies(self) -> tuple[Tensor, Tensor]:
        """Input and residual for a provider that works in place."""
        return arranged(self.input, self.case.layout), self.residual.clone()

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """Input, residual and weight, requiring grad."""
        return tuple(t.detach().requires_grad_() for t in (self.input, self.residual, self.weight))  # type: ignore[return-value]

    def least_bytes(self, direction: str) -> int:
        """What a forward or a backward has to move. Forward: out has input's bytes, residual_out has
        residual's. Backward: both gradients and residual_out in, grad_input (and grad_residual, where it has
        another dtype) and grad_weight out; rstd, four bytes a row, is left out."""
        if direction == "forward":
            return 2 * bytes_of((self.input, self.residual)) + bytes_of((self.weight,))
        written = [self.input] if self.input.dtype == self.residual.dtype else [self.input, self.residual]
        read = bytes_of((self.grad_out, self.grad_residual_out, self.residual))
        return read + bytes_of(written) + 2 * bytes_of((self.weight,))

    def reference(self, direction: str) -> dict[str, Tensor]:
        """The results in fp64."""
        h = self.input.double() + self.residual.double()
        rstd = (h.square().mean(-1, keepdim=True) + EPS).rsqrt_()
        if direction == "forward":
            return {"out": (h * rstd).mul_(self.weight.double()), "residual_out": h}
        n = h.mul_(rstd)
        grad_out = self.grad_out.double()
        grad_weight = (grad_out * n).sum(0)
        scaled = grad_out.mul_(self.weight.double())
        grad = scaled.sub_(n * (scaled * n).mean(-1, keepdim=True)).mul_(rstd).add_(self.grad_residual_out)
        return {"grad_input": grad, "grad_residual": grad, "grad_weight": grad_weight}

    def worst_error(self, results: dict[str, Tensor | None], reference: dict[str, Tensor]) -> float:
        """The largest relative error of the results, in units of what is tolerated: more than 1 is wrong, and
        so is NaN. A residual_out is held to its own dtype (some peers store it in the input's), all else to
        the coarsest."""
        coarsest = max(TOLERANCES[dtype] for dtype in DTYPES[self.case.dtype])
        errors = [0.0]
        for name, result in results.items():
            if result is None:
                continue
            tolerance = TOLERANCES[result.dtype] if name == "residual_out" else coarsest
            expected = reference[name]
            error = (result - expected).norm() / expected.norm()
            errors.append(error.item() / tolerance)
        return max(errors, key=lambda e: (e != e, e))  # NaN is the worst


def poison(problem: Problem, count: int = 6) -> None:
    """Fills the memory that the allocator hands out next with NaN, so that a result nobody wrote is seen."""
    blocks = [torch.full_like(problem.residual, float("nan")) for _ in range(count)]
    del blocks
