"""What torch is told about the operators beyond their kernels: vmap, and where DTensor finds its rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from .decompositions import decompose_table


def register_vmap(op: OpOverload, decomposition: Callable[..., Any]) -> None:
    """A batch dimension is one more dimension of rows: the kernel is kept, and called once. Where each sample has its own
    weight, or in the backward its own gradient of the weight, the decomposition takes the kernel's place.
    """
    names = [argument.name for argument in op._schema.arguments]
    weight = names.index("weight")
    is_backward = "output_mask" in names

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any, **kwargs: Any) -> tuple[Any, int]:
        rows = [
            arg if not isinstance(arg, Tensor)
            else arg.movedim(dim, 0) if dim is not None
            else arg.expand(info.batch_size, *arg.shape)
            for arg, dim in zip(args, in_dims, strict=True)
        ]  # fmt: skip
        if not is_backward and in_dims[weight : weight + 1] in ((), (None,)):
            return op(*rows[:weight], *args[weight:], **kwargs), 0
        if (weights := rows[weight]) is None:
            return decomposition(*rows, **kwargs), 0
        rows[weight] = weights.unflatten(0, (info.batch_size,) + (1,) * (rows[0].dim() - 2))
        results = decomposition(*rows, **kwargs)
        if is_backward and results[-1] is not None:
            results = *results[:-1], results[-1].view(weights.shape)
        return results, 0

    torch.library.register_vmap(op.name(), rule)


for _op, _decomposition in decompose_table().items():
    register_vmap(_op, _decomposition)
