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

# Looked up once: four attributes cost a twentieth of a call.
_add_rms_norm = torch.ops.fused.add_rms_norm.default
_rms_norm = torch.ops.fused.rms_norm.default


class Swapped:
    """Marks the subclasses. They keep upstream's name, for printing, FSDP policies and device maps.

    What they do differently is in the one class that ``_subclass`` makes, before upstream's, and what that
    needs to know is in closures: torch.compile guards every class and attribute that it looks at on the way,
    again for each module of a model, and a compiled decode step waits for the guards.
    """

    __slots__ = ()

    # How the class was made, upstream's class first among the arguments: for pickle, deepcopy and unpatch.
    recipe: ClassVar[tuple[Callable[..., type], tuple[Any, ...]]]


def _new(make_class: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    cls = make_class(*arguments)
    return cls.__new__(cls)


def _subclass(
    mark: type, make_class: Callable[..., type], arguments: tuple[Any, ...], **members: Any
) -> type:
    upstream: Any = arguments[0]
    recipe = make_class, arguments

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        reduced = upstream.__reduce_ex__(self, protocol)
        if "recipe" not in vars(type(self)):  # someone's subclass of ours, FSDP2's say
            return reduced
        return _new, recipe, *reduced[2:]

    members |= {"recipe": recipe, "__reduce_ex__": __reduce_ex__}
    for name in ("__module__", "__qualname__", "__doc__"):
        members[name] = getattr(upstream, name)
    return type(upstream.__name__, (upstream, mark), members)


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

    __slots__ = ()
    contract: ClassVar[Contract]


@functools.cache
def norm_class(upstream: Any, contract: Contract) -> type:
    # Of the op, less its defaults: each costs half a microsecond a call.
    options: dict[str, Any] = {"casting_mode": contract.casting_mode}
    if contract.offset:
        options["offset"] = contract.offset

    def __call__(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and observers.of_norm(self) is None:
            out = _fused(self, hidden_states, contract, options)
            if out is not None:
                return out
        return upstream.__call__(self, plain(hidden_states), *args, **kwargs)

    return _subclass(FusedNorm, norm_class, (upstream, contract), contract=contract, __call__=__call__)


def _fused(
    norm: nn.Module, hidden_states: Tensor | Stream, contract: Contract, options: dict[str, Any]
) -> Tensor | None:
    parameters = norm._parameters  # looked up first, for nn.Module looks there last
    weight: Any = parameters["weight"] if "weight" in parameters else getattr(norm, "weight", None)
    eps: Any = getattr(norm, contract.eps_name)
    if isinstance(hidden_states, Stream):
        base, branch = hidden_states.base, hidden_states.branch
        if branch is not None and fits(branch, base, weight, contract):
            if branch.dtype != base.dtype:  # under autocast: a bf16 branch joins an fp32 stream
                options = {**options, "out_dtype": base.dtype}
            out, residual = _add_rms_norm(branch, base, weight, eps, **options)
            hidden_states.base, hidden_states.branch = residual, None
            return out
        hidden_states = hidden_states.tensor()
    if fits(hidden_states, hidden_states, weight, contract):
        return _rms_norm(hidden_states, weight, eps, **options)
    return None


def fits(input: Tensor, residual: Tensor, weight: Tensor | None, contract: Contract) -> bool:
    """Whether the op takes these tensors and returns upstream's dtypes.

    Upstream's statistics are fp32 even in fp64 models. Its `llama` norms return the wider dtype of weight and
    stream, the others the stream's.
    """
    dtype = residual.dtype
    if (input.dtype, dtype) not in _DTYPES:
        return False
    if not (residual.is_cuda or residual.is_cpu or residual.is_meta):
        return False
    if weight is None or weight.device != residual.device:
        return weight is None
    if contract.casting_mode != "llama" or weight.dtype == dtype:
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

    __slots__ = ()
    family: ClassVar[Family]


@functools.cache
def layer_class(upstream: Any, family: Family) -> type:
    def __call__(self: Any, *args: Any, lazy_stream: bool = False, **kwargs: Any) -> Any:
        # `lazy_stream` comes from LazyModel, through upstream's loop: whoever calls knows Streams. What is
        # made of it is decided here, outside of `layer.compile()` and before any hook runs.
        if lazy_stream and why_tensors_around(self, family) is None:
            if observers.is_plain_call(self):
                return forward(self, *args, lazy_stream=True, **kwargs)
            return upstream.__call__(self, *args, lazy_stream=True, **kwargs)
        return upstream.__call__(self, *plain(args), **kwargs)

    @functools.wraps(upstream.forward)
    def forward(self: Any, hidden_states: Any, *args: Any, lazy_stream: bool = False, **kwargs: Any) -> Any:
        if not isinstance(hidden_states, Stream) and why_tensors_in(self, family) is None:
            hidden_states = Stream(hidden_states)
        output = upstream.forward(self, hidden_states, *args, **kwargs)
        return output if lazy_stream and isinstance(output, Stream) else plain(output)

    arguments = upstream, family
    return _subclass(LazyLayer, layer_class, arguments, family=family, __call__=__call__, forward=forward)


def why_tensors_around(layer: nn.Module, family: Family) -> str | None:
    """Why the stream enters and leaves the layer as a tensor."""
    return observers.of_layer(layer) or why_tensors_in(layer, family)


def why_tensors_in(layer: nn.Module, family: Family) -> str | None:
    """Why the layer runs as upstream's."""
    modules = layer._modules
    return _foreign(modules[family.first_norm]) or _foreign(modules[family.second_norm])


class LazyModel(Swapped):
    """An upstream model whose loop only hands the stream on, from layer to layer and to the final norm."""

    __slots__ = ()
    loop: ClassVar[Loop]


@functools.cache
def model_class(upstream: Any, loop: Loop) -> type:
    @functools.wraps(upstream.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if why_tensors_between(self, loop) is None:
            kwargs["lazy_stream"] = True
        return upstream.forward(self, *args, **kwargs)

    return _subclass(LazyModel, model_class, (upstream, loop), loop=loop, forward=forward)


def why_tensors_between(model: nn.Module, loop: Loop) -> str | None:
    """Why the layers must exchange tensors."""
    for layer in getattr(model, loop.layers):
        if not isinstance(layer, LazyLayer):
            return f"{type(layer).__name__} is among the layers"
    return _foreign(getattr(model, loop.norm))
