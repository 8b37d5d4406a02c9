"""What hf.py measures: each variant changes a model for good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def upstream(model: Any) -> None:
    pass


def torch_norm(model: Any) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    class TorchRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)

    for module in model.modules():
        if type(module) is LlamaRMSNorm:
            module.__class__ = TorchRMSNorm


def liger(model: Any) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    upstream_class = modeling_llama.LlamaRMSNorm
    try:
        apply_liger_kernel_to_llama(
            rope=False,
            swiglu=False,
            cross_entropy=False,
            fused_linear_cross_entropy=False,
            rms_norm=True,
            model=model,
        )
    finally:
        modeling_llama.LlamaRMSNorm = upstream_class  # other models' too


def patched(model: Any) -> None:
    from fused_add_rms_norm import hf

    report = hf.patch(model)
    assert report.fused_adds == report.adds, report


VARIANTS: dict[str, Callable[[Any], None]] = {
    "upstream": upstream,
    "F.rms_norm": torch_norm,
    "Liger": liger,
    "patched": patched,
}
