"""hf.patch and hf.unpatch: which modules get which class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from .contract import find_contract
from .families import FAMILIES, Family
from .loop import find_loop
from .modules import Swapped, layer_class, model_class, norm_class, swap, unwrapped, upstream_class
from .report import Report, report_on

_UPSTREAM = "transformers.models."


def supported() -> tuple[str, ...]:
    """The decoder layer classes of transformers that :func:`patch` knows, by name."""
    return tuple(sorted(FAMILIES))


def patch(model: nn.Module) -> Report:
    """Runs every residual add and norm of a Hugging Face model through the fused ops, forward and backward.

    Upstream's code stays as it is: its decoder layers, their norms and the model around them get a subclass
    of their class, of the same name, in which the residual stream is lazy. Weights, hooks, hidden states and
    saved files are those of an unpatched model. Whoever watches the stream between two modules gets
    upstream's tensor, and that add then runs on its own.

    Args:
        model: any module with decoder layers of :func:`supported` in it: a causal LM, a bare model, a PEFT
            model; loaded already, on any device, before or after ``fully_shard`` or ``dispatch_model``.
            Patching twice changes nothing.

    Returns:
        What is fused and what is not, and why; ``print`` shows a table.

    Raises:
        ValueError: no decoder layer is supported, or its norms do not compute what they are known to. The
            model is as it was.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
        >>> print(hf.patch(model))
    """
    stacks = list(_stacks(model))
    if not stacks:
        layers = {type(module).__name__ for module in model.modules() if "Layer" in type(module).__name__}
        raise ValueError(
            f"fused_add_rms_norm.hf cannot patch {type(model).__name__}: of its layers "
            f"({', '.join(sorted(layers)) or 'none'}) none is supported. Supported: {', '.join(supported())}"
        )
    classes: dict[nn.Module, type[nn.Module]] = {}
    for _, stack, layers_name in stacks:
        loop = find_loop(upstream_class(stack))
        for module in stack.modules():
            cls: Any = type(module)
            if issubclass(cls, Swapped):
                continue
            if module is stack and loop and loop.layers == layers_name:
                classes[module] = model_class(cls, loop)
            elif family := family_of(module):
                _check_norms(module, family)
                classes[module] = layer_class(cls, family)
            elif contract := find_contract(module, cls):
                classes[module] = norm_class(cls, contract)
    for module, cls in classes.items():
        swap(module, cls)
    return report_on(stacks)


def unpatch(model: nn.Module) -> None:
    """Gives every module of a patched model its own class back.

    Raises:
        RuntimeError: a module's class is no longer the one that :func:`patch` gave it: ``fully_shard`` after
            ``patch`` makes a further subclass. The model is as it was.
    """
    patched = [module for module in model.modules() if isinstance(module, Swapped)]
    for module in patched:
        if upstream_class(module) is type(module):
            raise RuntimeError(
                f"fused_add_rms_norm.hf cannot unpatch {type(module).__name__}: "
                "it was given a further class after it was patched"
            )
    for module in patched:
        swap(module, upstream_class(module))


def family_of(module: nn.Module) -> Family | None:
    """The family of a decoder layer that is upstream's own class, or FSDP2's subclass of it, or ours."""
    for cls in type(module).__mro__:
        if cls.__module__.startswith(_UPSTREAM):
            return FAMILIES.get(cls.__name__)
        if not (issubclass(cls, Swapped) or cls.__module__.startswith("torch.distributed.fsdp")):
            return None
    return None


def _check_norms(layer: nn.Module, family: Family) -> None:
    """Raises where upstream's own norms, which nobody replaced, do not compute what the table says."""
    for name in (family.first_norm, family.second_norm):
        norm = getattr(layer, name)
        if type(norm).__module__.startswith(_UPSTREAM) and not isinstance(norm, Swapped):
            contract = find_contract(norm, type(norm))
            if contract is None or contract[:2] != (family.casting_mode, family.offset):
                raise ValueError(
                    f"fused_add_rms_norm.hf cannot patch {type(layer).__name__}: expected its "
                    f"{type(norm).__name__} to compute {family.casting_mode}, offset {family.offset:g}, got "
                    f"{contract or 'something that the op does not compute'}"
                )


def _stacks(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Every module that holds a list of supported layers: its path, itself and the list's name."""
    for path, module in model.named_modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and any(family_of(unwrapped(layer)) for layer in child):
                yield path, module, name
