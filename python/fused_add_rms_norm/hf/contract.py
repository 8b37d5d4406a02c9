"""What an upstream norm computes, found by running it: the safety behind the promises of families.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._ops import CastingMode


class Contract(NamedTuple):
    """What makes ``fused::rms_norm`` compute what an upstream norm does."""

    casting_mode: CastingMode
    offset: float
    eps_name: str  # the norm's attribute that holds eps: read at every call, as upstream reads it

    def __str__(self) -> str:
        return f"{self.casting_mode}, offset {self.offset:g}"


def find_contract(norm: nn.Module, cls: type[nn.Module]) -> Contract | None:
    """The contract of `norm`, whose upstream class is `cls`; None where the op has none like it.

    ``cls.forward`` runs on a small bf16 sample and its bits are compared. The sample and its weights are
    random, never the model's: contracts differ in where they round, and a model's weights may hide that.

    Example:
        >>> find_contract(LlamaRMSNorm(64), LlamaRMSNorm)
        Contract(casting_mode='llama', offset=0.0, eps_name='variance_epsilon')
    """
    weight = norm._parameters.get("weight")
    if "Norm" not in cls.__name__ or norm._modules or norm._buffers or set(norm._parameters) - {"weight"}:
        return None
    # On the CPU whatever the model is on: it may be on the meta device, or be built under it.
    random = torch.Generator("cpu").manual_seed(0)
    cols = 64 if weight is None else weight.numel()
    # Rows small enough for eps to show, and squares that sum exactly in fp32 in any order.
    sample = torch.randint(-16, 17, (4, cols), generator=random, device="cpu").to(torch.bfloat16) / 16
    if weight is not None:
        weight = nn.Parameter(torch.randn(cols, generator=random, device="cpu").to(torch.bfloat16))

    probe = object.__new__(cls)  # a shallow copy; copy.copy would call FSDP2's __new__
    probe.__dict__.update(vars(norm), _parameters={"weight": weight})
    for eps_name in [name for name, value in vars(norm).items() if type(value) is float]:
        setattr(probe, eps_name, 2.0**-6)
        with torch.no_grad():
            try:
                upstream = cls.forward(probe, sample)
            except Exception:  # it wants more than the hidden states: a gate, say
                return None
            for casting_mode, offset in _KNOWN:
                expected = _formula(sample, weight, 2.0**-6, casting_mode, offset)
                if upstream.dtype == expected.dtype and torch.equal(upstream, expected):
                    return Contract(casting_mode, offset, eps_name)
        setattr(probe, eps_name, getattr(norm, eps_name))
    return None


_KNOWN: tuple[tuple[CastingMode, float], ...] = (("llama", 0.0), ("gemma", 0.0), ("gemma", 1.0))


def _formula(
    input: Tensor, weight: Tensor | None, eps: float, casting_mode: CastingMode, offset: float
) -> Tensor:
    """``fused::rms_norm`` in the words of upstream's code, so that equal contracts give equal bits."""
    hidden = input.float()
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    if casting_mode == "llama":
        hidden = hidden.to(input.dtype).float()
    if weight is not None:
        hidden = hidden * (offset + weight.float())
    return hidden.to(input.dtype)
