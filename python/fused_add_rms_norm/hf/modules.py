"""The subclasses that a patched model's modules become: upstream's, but for what is written here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from . import observers
from .contract import Contract
from .families import Family
from .loop import Loop
from .stream import Stream, plain


class Swapped(nn.Module):
    """Base of the subclasses. They keep upstream's name, for printing, FSDP policies and device maps."""

    # How the class was made, upstream's class first among the arguments: for pickle, deepcopy and unpatch.
    recipe: ClassVar[tuple[Callable[..., type], tuple[Any, ...]]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if "recipe" not in vars(type(self)):  # someone's subclass of ours, FSDP2's say
            return super().__reduce_ex__(protocol)
        reduced: Any = super().__reduce_ex__(protocol)
        return _new, self.recipe, *reduced[2:]


def _new(make_class: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    cls = make_class(*arguments)
    return cls.__new__(cls)


def _subclass(
    mixin: type, make_class: Callable[..., type], arguments: tuple[Any, ...], **members: Any
) -> type:
    upstream = arguments[0]
    for name in ("__module__", "__qualname__", "__doc__"):
        members[name] = getattr(upstream, name)
    return type(upstream.__name__, (mixin, upstream), {"recipe": (make_class, arguments), **members})


def upstream_class(module: nn.Module) -> type[nn.Module]:
    """The class that `module` has, or had before it was patched."""
    cls: Any = type(module)
    return cls.recipe[1][0] if "recipe" in vars(cls) else cls


def unwrapped(layer: nn.Module) -> nn.Module:
    """The layer inside what may wrap it alone: torch.compile's module, a checkpoint wrapper."""
    while not isinstance(layer, Swapped) and len(layer._modules) == 1:
        layer = next(iter(layer.children()))
    return layer


def swap(module: nn.Module, cls: type[nn.Module]) -> None:
    """Gives `module` another class, and another bound forward where one is kept in it, as accelerate does."""
    former = type(module).forward
    module.__class__ = cls
    for name in ("forward", "_old_forward"):
        if getattr(module.__dict__.get(name), "__func__", None) is former:
            module.__dict__[name] = MethodType(cls.forward, module)


class FusedNorm(Swapped):
    """An upstream RMSNorm that does a pending sum inside the op.

    It does so in ``__call__``, before ``forward`` and any hook: those only ever see tensors.
    """

    contract: ClassVar[Contract]
    options: ClassVar[dict[str, Any]]  # of the op, less its defaults: each costs half a microsecond a call

    def __call__(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and observers.of_norm(self) is None:
            out = self._fused(hidden_states)
            if out is not None:
                return out
        return super().__call__(plain(hidden_states), *args, **kwargs)

    def _fused(self, hidden_states: Tensor | Stream) -> Tensor | None:
        weight, eps = getattr(self, "weight", None), getattr(self, self.contract.eps_name)
        if isinstance(hidden_states, Stream):
            base, branch = hidden_states.base, hidden_states.branch
            if branch is not None and self._fits(branch, base, weight):
                options = self.options
                if branch.dtype != base.dtype:  # under autocast: a bf16 branch joins an fp32 stream
                    options = {**options, "out_dtype": base.dtype}
                out, residual = torch.ops.fused.add_rms_norm.default(branch, base, weight, eps, **options)
                hidden_states.base, hidden_states.branch = residual, None
                return out
            hidden_states = hidden_states.tensor()
        if self._fits(hidden_states, hidden_states, weight):
            return torch.ops.fused.rms_norm.default(hidden_states, weight, eps, **self.options)
        return None

    def _fits(self, input: Tensor, residual: Tensor, weight: Tensor | None) -> bool:
        """Whether the op takes these tensors and returns upstream's dtypes.

        Upstream's statistics are fp32 even in fp64 models. Its `llama` norms return the wider dtype of
        weight and stream, the others the stream's.
        """
        dtype = residual.dtype
        if (input.dtype, dtype) not in _DTYPES:
            return False
        if not (residual.is_cuda or residual.is_cpu or residual.is_meta):
            return False
        if weight is None or weight.device != residual.device:
            return weight is None
        if self.contract.casting_mode != "llama" or weight.dtype == dtype:
            return True
        return torch.promote_types(weight.dtype, dtype) == dtype


# Of the branch and of the stream.
_DTYPES = {
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
}


@functools.cache
def norm_class(upstream: Any, contract: Contract) -> type:
    options: dict[str, Any] = {"casting_mode": contract.casting_mode}
    if contract.offset:
        options["offset"] = contract.offset
    return _subclass(FusedNorm, norm_class, (upstream, contract), contract=contract, options=options)


def _foreign(norm: Any) -> str | None:
    """Why no Stream may reach what stands in a norm's place. A fused norm looks after itself."""
    if isinstance(norm, FusedNorm):
        return None
    # PEFT's modules_to_save hands its argument to a copy of the norm, untouched.
    if isinstance(norm._modules.get("original_module"), FusedNorm):
        return observers.of_norm(norm)
    return f"{type(norm).__name__} is in the norm's place"


class LazyLayer(Swapped):
    """An upstream decoder layer around a lazy residual stream."""

    family: ClassVar[Family]

    def __call__(self, *args: Any, lazy_stream: bool = False, **kwargs: Any) -> Any:
        # `lazy_stream` comes from LazyModel, through upstream's loop: whoever calls knows Streams. What is
        # made of it is decided here, outside of `layer.compile()` and before any hook runs.
        if lazy_stream and self.observed() is None:
            return super().__call__(*args, lazy_stream=True, **kwargs)
        return super().__call__(*plain(args), **kwargs)

    def observed(self) -> str | None:
        """Why the stream enters and leaves the layer as a tensor."""
        return observers.of_layer(self) or self.foreign()

    def foreign(self) -> str | None:
        """Why the layer runs as upstream's."""
        modules = self._modules
        return _foreign(modules[self.family.first_norm]) or _foreign(modules[self.family.second_norm])


@functools.cache
def layer_class(upstream: Any, family: Family) -> type:
    @functools.wraps(upstream.forward)
    def forward(self: Any, hidden_states: Any, *args: Any, lazy_stream: bool = False, **kwargs: Any) -> Any:
        if not isinstance(hidden_states, Stream) and self.foreign() is None:
            hidden_states = Stream(hidden_states)
        output = upstream.forward(self, hidden_states, *args, **kwargs)
        return output if lazy_stream and isinstance(output, Stream) else plain(output)

    return _subclass(LazyLayer, layer_class, (upstream, family), family=family, forward=forward)


class LazyModel(Swapped):
    """An upstream model whose loop only hands the stream on, from layer to layer and to the final norm."""

    loop: ClassVar[Loop]

    def foreign(self) -> str | None:
        """Why the layers must exchange tensors."""
        for layer in getattr(self, self.loop.layers):
            if not isinstance(layer, LazyLayer):
                return f"{type(layer).__name__} is among the layers"
        return _foreign(getattr(self, self.loop.norm))


@functools.cache
def model_class(upstream: Any, loop: Loop) -> type:
    @functools.wraps(upstream.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.foreign() is None:
            kwargs["lazy_stream"] = True
        return upstream.forward(self, *args, **kwargs)

    return _subclass(LazyModel, model_class, (upstream, loop), loop=loop, forward=forward)
