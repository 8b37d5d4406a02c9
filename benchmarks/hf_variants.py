"""What hf.py measures: each variant changes the model for as long as it is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F


@contextmanager
def upstream(model: Any) -> Iterator[None]:
    yield


@contextmanager
def torch_norm(model: Any) -> Iterator[None]:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)

    with _norms_as_they_were(model) as norms:
        for norm in norms:
            cls = type(norm)
            norm.__class__ = type(cls.__name__, (cls,), {"forward": forward})
        yield


@contextmanager
def liger(model: Any) -> Iterator[None]:
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    former_class = modeling_llama.LlamaRMSNorm
    with _norms_as_they_were(model):
        apply_liger_kernel_to_llama(
            rope=False,
            swiglu=False,
            cross_entropy=False,
            fused_linear_cross_entropy=False,
            rms_norm=True,
            model=model,
        )
        try:
            yield
        finally:
            modeling_llama.LlamaRMSNorm = former_class


@contextmanager
def patched(model: Any) -> Iterator[None]:
    from fused_add_rms_norm import hf

    report = hf.patch(model)
    assert report.fused_adds == report.adds, report
    try:
        yield
    finally:
        hf.unpatch(model)


@contextmanager
def _norms_as_they_were(model: Any) -> Iterator[list[Any]]:
    norms = [module for module in model.modules() if type(module).__name__ == "LlamaRMSNorm"]
    before = [(type(norm), dict(vars(norm))) for norm in norms]
    try:
        yield norms
    finally:
        for norm, (cls, members) in zip(norms, before, strict=True):
            norm.__class__ = cls
            vars(norm).clear()
            vars(norm).update(members)


VARIANTS: dict[str, Callable[[Any], Any]] = {
    "upstream": upstream,
    "F.rms_norm": torch_norm,
    "Liger": liger,
    "patched": patched,
}
