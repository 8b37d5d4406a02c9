"""What is fused in a patched model, what is not and why; and a count of what really ran fused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import observers
from .modules import (
    FusedNorm,
    LazyLayer,
    LazyModel,
    unwrapped,
    why_tensors_around,
    why_tensors_between,
    why_tensors_in,
)


@dataclass(frozen=True)
class Site:
    """One residual add of a decoder layer, or one norm that follows none.

    Attributes:
        model: where the stack of layers is, as in ``named_modules()``.
        layer: the layer's number.
        add: ``"attention"`` or ``"mlp"``; None for a norm without one.
        norm: the norm, as seen from the layer.
        contract: what the norm computes, or ``""`` where that is not known.
        reason: why it is not fused; None where it is.
    """

    model: str
    layer: int
    add: str | None
    norm: str
    contract: str
    reason: str | None


@dataclass(frozen=True)
class Report:
    """What a plain forward of a patched model fuses. ``print(report)`` shows it as a table."""

    sites: tuple[Site, ...]

    @property
    def adds(self) -> int:
        """How many residual adds the model has."""
        return sum(site.add is not None for site in self.sites)

    @property
    def fused_adds(self) -> int:
        """How many of them run inside ``fused::add_rms_norm``."""
        return sum(site.add is not None and site.reason is None for site in self.sites)

    def __str__(self) -> str:
        def alike(site: Site) -> tuple[Any, ...]:
            return site.model, site.add or "", site.norm, site.contract, site.reason or "fused"

        rows = []
        for key, group in groupby(sorted(self.sites, key=alike), alike):
            layers = [site.layer for site in group]
            rows.append((key[0], layers, *key[1:]))
        rows.sort(key=lambda row: (row[0], row[1][0], row[2] == "", row[2]))
        table = [("model", "layers", "add", "norm", "contract", "")]
        table += [(model or ".", _ranges(layers), *rest) for model, layers, *rest in rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return "\n".join([*lines, f"{self.fused_adds} of {self.adds} residual adds fused"])


def _ranges(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"0-2,5"``."""
    parts = []
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        run_numbers = [number for _, number in run]
        parts.append(f"{run_numbers[0]}-{run_numbers[-1]}" if len(run_numbers) > 1 else str(run_numbers[0]))
    return ",".join(parts)


def report_on(stacks: list[tuple[str, nn.Module, str]]) -> Report:
    """A report on lists of layers: where the module is that holds them, the module, and the list's name."""
    return Report(tuple(site for stack in stacks for site in _sites(*stack)))


def _sites(path: str, model: nn.Module, layers_name: str) -> Iterator[Site]:
    layers = [unwrapped(layer) for layer in getattr(model, layers_name)]
    for index, layer in enumerate(layers):
        if not isinstance(layer, LazyLayer):
            for add in ("attention", "mlp"):
                yield Site(path, index, add, "?", "", f"{type(layer).__name__} is not a patched layer")
            continue
        family = layer.family
        first, second = family.first_norm, family.second_norm
        norm = getattr(layer, second)
        yield Site(
            path, index, "attention", second, _contract(norm), why_tensors_in(layer, family) or _watched(norm)
        )

        reason = why_tensors_around(layer, family)
        if index + 1 < len(layers):
            follower = layers[index + 1]
            norm, name = getattr(follower, first, None), f"next layer's {first}"
            if isinstance(follower, LazyLayer):
                reason = reason or why_tensors_around(follower, follower.family)
        else:
            name = model.loop.norm if isinstance(model, LazyModel) else "norm"
            norm = getattr(model, name, None)
        yield Site(path, index, "mlp", name, _contract(norm), _between(model) or reason or _watched(norm))

        after_an_add = {second, first} if index else {second}
        for name, module in layer.named_modules():
            if isinstance(module, FusedNorm) and name.split(".")[0] not in after_an_add:
                yield Site(path, index, None, name, str(module.contract), _watched(module))


def _between(model: nn.Module) -> str | None:
    if isinstance(model, LazyModel):
        return why_tensors_between(model, model.loop)
    return f"{type(model).__name__}.forward does more than hand the stream on"


def _contract(norm: nn.Module | None) -> str:
    norm = getattr(norm, "original_module", norm)  # under PEFT's wrapper
    return str(norm.contract) if isinstance(norm, FusedNorm) else ""


def _watched(norm: Any) -> str | None:
    return observers.of_norm(norm) if norm is not None else None


class count(TorchDispatchMode):
    """Counts what runs fused inside a ``with`` block, in eager mode.

    Attributes:
        adds: residual adds, each with its norm.
        norms: norms without an add.

    Example:
        >>> with hf.count() as fused:
        ...     model(input_ids)
        >>> fused.adds == 2 * model.config.num_hidden_layers
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self.adds = 0
        self.norms = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removesuffix("_forward")
        self.adds += name == "fused::add_rms_norm"
        self.norms += name == "fused::rms_norm"
        return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:
        return f"{self.adds} fused adds, {self.norms} norms"
