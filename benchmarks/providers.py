"""Who is measured: this project, what PyTorch offers, and every public kernel for the same operation that is
installed.

A provider binds itself to a problem and gives back a call to time. It names what it reads and returns what it
wrote, so that the bytes are counted from its own tensors and its results are checked before it is timed.
Whatever it raises on the way is a refusal, and is reported as one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from problems import EPS, Problem, bytes_of
from torch import Tensor

RESULTS = ("out", "residual_out")
GRADIENTS = ("grad_input", "grad_residual", "grad_weight")

# (input, residual, weight) -> RESULTS
Function = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Work:
    """A call to time: ``names`` says what each result is, ``reads`` holds what it cannot do without."""

    run: Callable[[], Sequence[Tensor | None]]
    names: tuple[str, ...]
    reads: tuple[Tensor, ...]

    def results(self) -> dict[str, Tensor | None]:
        return dict(zip(self.names, self.run(), strict=False))

    def bytes_moved(self, results: dict[str, Tensor | None]) -> int:
        return bytes_of(self.reads) + bytes_of(results.values())


@dataclass(frozen=True)
class Provider:
    """One implementation. ``bind`` gives its function for a problem; ``backward`` its own backward entry,
    where it has one that is cheaper to call than autograd. ``compiles``: the first call at a new shape takes
    seconds; ``caches``: what it compiles is found on disk by the next process."""

    name: str
    bind: Callable[[Problem], Function]
    backward: Callable[[Problem], Work] | None = None
    in_place: bool = False
    differentiable: bool = True
    compiles: bool = False
    caches: bool = True
    on_cpu: bool = False

    @property
    def is_project(self) -> bool:
        return self.name.startswith("fused")

    def work(self, problem: Problem, direction: str) -> Work:
        """One forward with no gradient wanted, or one backward with the gradients of both results given."""
        return self._forward(problem) if direction == "forward" else self._backward(problem)

    def _forward(self, problem: Problem) -> Work:
        function, weight = self.bind(problem), problem.weight
        input, residual = problem.copies() if self.in_place else (problem.input, problem.residual)
        return Work(lambda: function(input, residual, weight), RESULTS, (input, residual, weight))

    def _backward(self, problem: Problem) -> Work:
        if self.backward is not None:
            return self.backward(problem)
        leaves = problem.leaves()
        results = self.bind(problem)(*leaves)
        grads = (problem.grad_out, problem.grad_residual_out.to(results[1].dtype))
        return Work(
            lambda: torch.autograd.grad(results, leaves, grads, retain_graph=True),
            GRADIENTS,
            (*grads, results[1].detach(), problem.weight),
        )

    def train_call(self, problem: Problem) -> Callable[[], object]:
        """Forward and backward through autograd."""
        leaves, function = problem.leaves(), self.bind(problem)
        grads = (problem.grad_out, problem.grad_residual_out)
        return lambda: torch.autograd.grad(function(*leaves), leaves, grads)


def fused() -> list[Provider]:
    import fused_add_rms_norm  # noqa: F401  (registers the operators)

    ops = torch.ops.fused

    def in_place(input: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ops.add_rms_norm_.default(input, residual, weight, EPS)
        return input, residual

    def bind_out(problem: Problem) -> Function:
        out = torch.empty(problem.input.shape, dtype=problem.input.dtype, device=problem.input.device)
        residual_out = torch.empty_like(problem.residual)

        def function(input: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            ops.add_rms_norm_out.default(input, residual, weight, EPS, out=out, residual_out=residual_out)
            return out, residual_out

        return function

    def backward(problem: Problem) -> Work:
        input, residual, weight = problem.input, problem.residual, problem.weight
        _, h, rstd = ops.add_rms_norm_forward.default(input, residual, weight, EPS, 0.0, "fp32", None)
        wanted = (
            0b101 if input.dtype == residual.dtype else 0b111
        )  # grad_residual is grad_input where dtypes agree
        return Work(
            lambda: ops.add_rms_norm_backward.default(
                problem.grad_out,
                problem.grad_residual_out,
                h,
                rstd,
                weight,
                EPS,
                0.0,
                input.dtype,
                wanted,
            ),
            GRADIENTS,
            (problem.grad_out, problem.grad_residual_out, h, weight),
        )

    return [
        Provider(
            "fused", lambda _: lambda x, r, w: ops.add_rms_norm.default(x, r, w, EPS), backward, on_cpu=True
        ),
        Provider("fused in place", lambda _: in_place, in_place=True, differentiable=False, on_cpu=True),
        Provider("fused out=", bind_out, differentiable=False, on_cpu=True),
    ]


def add_then_rms_norm(input: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What PyTorch users write."""
    h = input + residual
    return F.rms_norm(h, h.shape[-1:], weight, EPS).to(input.dtype), h


def hugging_face(input: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What a Hugging Face Llama layer runs: the add, then LlamaRMSNorm."""
    h = input + residual
    n = h.to(torch.float32)
    n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + EPS)
    return (weight * n.to(h.dtype)).to(input.dtype), h


def eager() -> list[Provider]:
    return [
        Provider("add + F.rms_norm", lambda _: add_then_rms_norm, on_cpu=True),
        Provider("Hugging Face", lambda _: hugging_face, on_cpu=True),
    ]


def compiled() -> list[Provider]:
    def bind(_: Problem) -> Function:
        torch._dynamo.reset()  # else the shapes before this one make it a dynamic kernel, which is slower
        return torch.compile(add_then_rms_norm, dynamic=False)

    return [Provider("torch.compile", bind, compiles=True)]


def triton() -> list[Provider]:
    import triton_kernel

    def plain(in_place: bool) -> Function:
        return lambda x, r, w: triton_kernel.add_rms_norm(x, r, w, EPS, in_place=in_place)  # type: ignore[return-value]

    return [
        Provider("Triton", lambda _: plain(False), differentiable=False, compiles=True),
        Provider(
            "Triton in place", lambda _: plain(True), in_place=True, differentiable=False, compiles=True
        ),
    ]


def flashinfer() -> list[Provider]:
    from flashinfer.norm import fused_add_rmsnorm

    def function(pdl: bool) -> Function:
        def in_place(input: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            fused_add_rmsnorm(input, residual, weight, EPS, enable_pdl=pdl)
            return input, residual

        return in_place

    return [
        Provider("FlashInfer", lambda _: function(False), in_place=True, differentiable=False, compiles=True),
        Provider(
            "FlashInfer PDL", lambda _: function(True), in_place=True, differentiable=False, compiles=True
        ),
    ]


def liger() -> list[Provider]:
    from liger_kernel.ops import fused_add_rms_norm as liger_triton

    def function(input: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        apply = liger_triton.LigerFusedAddRMSNormFunction.apply
        return apply(input, residual, weight, EPS, 0.0, "llama", False)  # type: ignore[no-any-return]

    def backward(problem: Problem) -> Work:
        forward = liger_triton.fused_add_rms_norm_forward
        _, h, rstd, *settings = forward(problem.input, problem.residual, problem.weight, EPS, 0.0, "llama")
        block, warps, stages, mode = settings
        arguments = (h, problem.weight, rstd, 0.0, mode, block, warps, stages, False)
        return Work(
            lambda: liger_triton.fused_add_rms_norm_backward(
                problem.grad_out, problem.grad_residual_out, *arguments
            ),
            GRADIENTS,
            (problem.grad_out, problem.grad_residual_out, h, problem.weight),
        )

    return [Provider("Liger Triton", lambda _: function, backward, compiles=True)]


def liger_cute() -> list[Provider]:
    import cutlass.cute  # noqa: F401  (absent: Liger would fall back to Triton)
    from liger_kernel.functional import fused_add_rms_norm

    os.environ.setdefault(
        "LIGER_KERNEL_STRICT", "1"
    )  # refuse, instead of running the Triton kernel under this name
    return [
        Provider(
            "Liger CuTe",
            lambda _: lambda x, r, w: fused_add_rms_norm(x, r, w, EPS, impl="nvidia-cutedsl"),
            compiles=True,
            caches=False,
        )
    ]


def quack() -> list[Provider]:
    from quack.rmsnorm import rmsnorm, rmsnorm_bwd, rmsnorm_fwd

    def backward(problem: Problem) -> Work:
        _, h, rstd = rmsnorm_fwd(
            problem.input, problem.weight, residual=problem.residual, eps=EPS, store_rstd=True
        )

        def run() -> Sequence[Tensor | None]:
            grad_input, grad_weight, _, grad_residual = rmsnorm_bwd(
                h, problem.weight, problem.grad_out, rstd, problem.grad_residual_out, has_residual=True
            )
            # It gives both in the stream's dtype; autograd would cast the input's, as here.
            return grad_input.to(problem.input.dtype), grad_residual, grad_weight

        return Work(
            run,
            GRADIENTS,
            (problem.grad_out, problem.grad_residual_out, h, problem.weight),
        )

    return [
        Provider(
            "Quack",
            lambda _: lambda x, r, w: rmsnorm(x, w, residual=r, eps=EPS, prenorm=True),
            backward,
            compiles=True,
        )
    ]


def vllm() -> list[Provider]:
    from vllm._custom_ops import fused_add_rms_norm

    def in_place(input: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        fused_add_rms_norm(input, residual, weight, EPS)
        return input, residual

    return [Provider("vLLM", lambda _: in_place, in_place=True, differentiable=False)]


def flash_attention() -> list[Provider]:
    from flash_attn.ops.triton.layer_norm import rms_norm_fn

    return [
        Provider(
            "flash-attention",
            lambda _: lambda x, r, w: rms_norm_fn(x, w, None, residual=r, eps=EPS, prenorm=True),
            compiles=True,
        )
    ]


# In the order they are measured in: this project and what compiles nothing first, the slowest to compile
# last.
PROJECT = (fused,)
PEERS = (eager, vllm, triton, flashinfer, liger, quack, liger_cute, flash_attention, compiled)


def load(groups: Sequence[Callable[[], list[Provider]]]) -> tuple[list[Provider], dict[str, str]]:
    """The providers of these groups, and why each absent group is absent."""
    providers: list[Provider] = []
    absent: dict[str, str] = {}
    for group in groups:
        try:
            providers += group()
        except Exception as error:  # a peer may break in any way while it is imported
            absent[group.__name__] = f"{type(error).__name__}: {error}"
    return providers, absent
