"""The residual stream as a lazy tensor: upstream's ``residual + x`` is left to the norm that follows it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(eq=False)
class Stream:
    """A tensor, or a sum ``base + branch`` that nobody has needed yet.

    The norms of a patched model take a pending sum apart and do it inside ``fused::add_rms_norm``.
    Everything else (an attribute, an operator, a torch function) does the sum first and goes on with the
    tensor: a use that nobody foresaw costs a plain add and is never wrong. Whoever does the sum leaves it
    here as ``base``, so that a second reader finds it, and a frame that holds on to the Stream keeps one
    tensor alive, as it does upstream.
    """

    base: Tensor
    branch: Tensor | None = None

    def tensor(self) -> Tensor:
        """The value, summed if it was pending."""
        if self.branch is not None:
            self.base, self.branch = torch.add(self.base, self.branch), None
        return self.base

    def add(self, other: Any) -> Any:
        """``self + other``: pending where `other` is a branch of the stream's shape."""
        base = self.base if self.branch is None else self.tensor()
        if isinstance(other, Tensor) and other.shape == base.shape:
            return Stream(base, other)
        return torch.add(base, plain(other))

    __add__ = __radd__ = add

    # What can be told of a sum before it is done.

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def dtype(self) -> torch.dtype:
        if self.branch is None:
            return self.base.dtype
        return torch.promote_types(self.base.dtype, self.branch.dtype)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """A move to the device it is on (accelerate asks for one at every layer) leaves the sum pending."""
        is_device = len(args) == 1 and isinstance(args[0], int | str | torch.device)
        if is_device and not kwargs.keys() - {"non_blocking"} and torch.device(args[0]) == self.device:
            return self
        return self.tensor().to(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols of copy, pickle, numpy: not of the tensor's value
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _ADDS and len(args) == 2 and not kwargs:
            left, right = args
            return left.add(right) if isinstance(left, Stream) else right.add(left)
        return func(*plain(args), **plain(kwargs or {}))


# Dynamo sends `stream + x` to __torch_function__ under one of these names, eager Python `x + stream`.
_ADDS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, operator.add)


def plain(value: Any) -> Any:
    """`value` with every Stream in it, in containers too, replaced by its tensor."""
    if isinstance(value, Stream):
        return value.tensor()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(plain, value))
    if isinstance(value, tuple | list):
        return type(value)(map(plain, value))
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: Stream, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*plain(args))

    return method


# Python looks operators up on the type, past __getattr__. Those in place write to upstream's tensor, as they
# would without us.
_OPERATORS = [
    "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv", "matmul",
    "rmatmul", "pow", "neg", "abs", "invert", "and", "or", "xor", "eq", "ne", "lt", "le", "gt", "ge",
    "getitem", "setitem", "len", "iter", "bool", "int", "float",
]  # fmt: skip
for _name in _OPERATORS:
    setattr(Stream, f"__{_name}__", _delegate(f"__{_name}__"))
Stream.__hash__ = object.__hash__  # type: ignore[method-assign]  # as a tensor's: by identity

# FSDP2 hangs its backward hooks on the tensors in what a layer takes and returns. Newer torch finds those
# of a dataclass, older torch those of a pytree.
pytree.register_pytree_node(
    Stream,
    lambda stream: ([stream.base, stream.branch], None),
    lambda leaves, _: Stream(*leaves),
    serialized_type_name="fused_add_rms_norm.hf.Stream",
)
