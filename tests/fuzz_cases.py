"""The random calls of fuzz.py: what hypothesis, or a seeded generator, can choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from arena import Layout, dense, writable
from reference import CASTING_MODES, DTYPES
from torch import Tensor

Item = TypeVar("Item")
Choose = Callable[[Sequence[Item]], Item]

FORMS = ("add_rms_norm", "rms_norm", "add_rms_norm_", "add_rms_norm_out")
# Where kernels change hands: powers of two, and 16-byte vectors that do not divide a row.
EDGES = [base + by for base in (128, 256, 512, 1024, 2048) for by in (-8, -1, 0, 1, 8)]
LONG = [base + by for base in (4096, 8192, 16384, 32768, 65536, 131072, 262144) for by in (-8, -1, 0, 1, 8)]


@dataclass(frozen=True)
class Case:
    """One call. Its printed form is the call to repeat it: `check(Case(...), arena)`."""

    form: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]  # of input, residual, out
    weight_dtype: torch.dtype | None
    layouts: dict[str, Layout]  # by the tensor's name
    over: dict[str, tuple[str, int]]  # tensors that start so many elements into another
    eps: float
    offset: float
    casting_mode: str
    needs_grad: tuple[bool, bool, bool]  # input, residual, weight
    used: tuple[bool, bool]  # out, residual_out
    pattern: str
    scale: float
    seed: int


def some_shape(choose: Choose[Any], max_numel: int) -> tuple[int, ...]:
    kinds = [[n for n in kind if 4 * n <= max_numel] for kind in (range(1, 65), range(1, 65), EDGES, LONG)]
    shape = [choose(choose([kind for kind in kinds if kind]))]
    for _ in range(choose((1, 1, 2, 2, 3, 4, 0))):
        sizes = (2, 1, 3, 5, 17, 64, 133, 300, 1025, 0) if choose(range(3)) == 2 else (2, 1, 3, 4, 7)
        shape.insert(0, choose([n for n in sizes if n * math.prod(size or 1 for size in shape) <= max_numel]))
    return tuple(shape)


def some_layout(choose: Choose[Any], shape: tuple[int, ...]) -> Layout:
    rank = len(shape)
    if choose(range(3)) == 0:
        return dense(rank)
    order = list(range(rank))
    if rank > 1 and choose(range(4)) == 3:
        movable = range(rank if choose(range(4)) == 3 else rank - 1)  # the last dimension seldom moves
        first, second = choose(movable), choose(movable)
        order[first], order[second] = order[second], order[first]
    last = rank - 1
    layout = Layout(
        order=tuple(order),
        steps=tuple(choose((1,) * (15 if dim == last else 5) + (2,)) for dim in range(rank)),
        pads=tuple(choose((0, 0, 0, 1, 3, 8) if dim == last else (0, 0, 0, 1)) for dim in range(rank)),
        expanded=tuple(choose((False,) * 11 + (True,)) for _ in range(rank)),
        offset=choose((0, 0, 1, 2, 3, 8)),
    )
    return layout if layout.strides(shape)[1] <= 4 * math.prod(shape) + 10_000 else dense(rank)


def some_overlaps(choose: Choose[Any], case: Case) -> dict[str, tuple[str, int]]:
    """Pairs of tensors that may be one, meet, or lie side by side in one buffer."""
    if case.form == "add_rms_norm_":
        pairs = {"residual": ("input",), "weight": ("input", "residual")}
    else:
        pairs = {
            "residual": ("input",),
            "weight": ("input",),
            "out": ("input", "residual", "weight"),
            "residual_out": ("residual", "input", "weight", "out"),
        }
    cols, numel = case.shape[-1], math.prod(case.shape)
    shifts = (0, 0, 0, 1, 8, cols - 1, cols, cols + 8, numel)
    return {
        name: (choose(targets), choose(shifts)) for name, targets in pairs.items() if choose(range(3)) == 2
    }


def some_case(choose: Choose[Any], max_numel: int) -> Case:
    form = choose(FORMS[:1] * 3 + FORMS[1:])
    shape = some_shape(choose, max_numel)
    dtypes = choose(DTYPES)
    if form == "rms_norm":
        dtypes = (dtypes[0],) * 3
    elif form == "add_rms_norm_":
        dtypes = (dtypes[0], dtypes[1], dtypes[0])
    names = ("input", "residual", "out", "residual_out", "grad_out", "grad_residual_out")
    layouts = {name: some_layout(choose, shape) for name in names}
    layouts["weight"] = some_layout(choose, shape[-1:])
    case = Case(
        form=form,
        shape=shape,
        dtypes=dtypes,
        weight_dtype=choose((dtypes[0], None, torch.float32, torch.bfloat16, torch.float16, torch.float64)),
        layouts=layouts,
        over={},
        eps=choose((1e-6, 1e-5, 1e-12, 1e-3, 1.0)),
        offset=choose((0.0, 1.0, -0.375)),
        casting_mode=choose(CASTING_MODES),
        needs_grad=(choose((True, True, False)), choose((True, True, False)), choose((True, True, False))),
        used=(True, False) if form == "rms_norm" else choose(((True, True), (True, False), (False, True))),
        pattern=choose(("random", "zero rows", "constant", "one large", "cancelling")),
        scale=choose((1.0, 1.0, 2.0**-7, 2.0**4)),
        seed=choose(range(1 << 16)),
    )
    if form in ("add_rms_norm_", "add_rms_norm_out") and math.prod(shape) <= 20_000:
        over = some_overlaps(choose, case)
        same_layout = choose((True, True, False))
        for name, (target, _) in over.items():
            if same_layout and name != "weight" and target != "weight":
                layouts[name] = layouts[target]
        case = replace(case, over=over)
    return case


def fill(case: Case, tensors: dict[str, Tensor]) -> None:
    """Values for the arguments; along an expanded dimension all get the first one's."""
    generator = torch.Generator().manual_seed(case.seed)  # the same on every device
    values = {name: torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
    x, r = (values.get(name, values["input"]) for name in ("input", "residual"))
    for value in (x, r) if r is not x else (x,):
        value *= case.scale
    if case.pattern == "zero rows":
        x.view(-1, x.shape[-1])[::2] = r.view(-1, x.shape[-1])[::2] = 0
    elif case.pattern == "constant":
        x.fill_(case.scale / 3)
    elif case.pattern == "one large":
        x[..., :1] *= 64
    elif case.pattern == "cancelling" and r is not x:
        r.copy_(r / 64 - x)
    for name, tensor in tensors.items():
        each = writable(tensor)
        each.copy_(values[name][tuple(slice(size) for size in each.shape)])
