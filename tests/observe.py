"""What a piece of code runs, seen from the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).removesuffix(".default"))
        return func(*args, **(kwargs or {}))


def operators(call: Callable[[], Any]) -> list[str]:
    """Names of the operators that reach a kernel while ``call`` runs; views and detach are left out."""
    with _Operators() as seen:
        call()
    views = (
        "detach",
        "permute",
        "expand",
        "view",
        "t",
        "transpose",
        "unsqueeze",
        "squeeze",
        "select",
        "alias",
    )
    return [name for name in seen.names if name.removeprefix("aten.").split(".")[0] not in views]
