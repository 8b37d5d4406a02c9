"""What torch is told about the operators beyond their kernels: vmap, and where DTensor finds its rules."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from .decompositions import decompose_table


def register_vmap(op: OpOverload, decomposition: Callable[..., Any]) -> None:
    """A batch dimension is one more dimension of rows: the kernel is kept, and called once. Where each sample
    has its own weight, or in the backward its own gradient of the weight, the decomposition takes its place.
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


class _AfterDTensor(importlib.abc.MetaPathFinder):
    """Registers the sharding rules when torch.distributed.tensor is imported. Importing it ourselves would
    add half a second to every import of this package.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != "torch.distributed.tensor":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            from . import _sharding  # noqa: F401

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if "torch.distributed.tensor" in sys.modules:
    from . import _sharding  # noqa: F401
else:
    sys.meta_path.insert(0, _AfterDTensor())
