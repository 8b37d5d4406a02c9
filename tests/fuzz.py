"""Random calls of the operators against tests/reference.py. test_fuzz.py has hypothesis choose them; as a program,

    python tests/fuzz.py --device cuda --examples 20000 --json summary.json

a seeded generator does. A failure prints its seed: `--seed SEED --examples 1` repeats it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from arena import Arena, Layout, dense, same_bits, writable
from reference import (
    CASTING_MODES,
    DTYPES,
    accumulation_dtype,
    assert_rounds_to,
    backward,
    forward,
)
from torch import Tensor

import fused_add_rms_norm as fused

Item = TypeVar("Item")
Choose = Callable[[Sequence[Item]], Item]

FORMS = ("add_rms_norm", "rms_norm", "add_rms_norm_", "add_rms_norm_out")
# Where kernels change hands: powers of two, and 16-byte vectors that do not divide a row.
EDGES = [base + by for base in (128, 256, 512, 1024, 2048) for by in (-8, -1, 0, 1, 8)]
LONG = [base + by for base in (4096, 8192, 16384, 32768, 65536, 131072, 262144) for by in (-8, -1, 0, 1, 8)]
SMALL, LARGE = 5_000, 1_000_000  # elements of a tensor
ARENA_BYTES = 256 << 20


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


# --- Generation -----------------------------------------------------------------------------------------------------------


def some_shape(choose: Choose[Any], max_numel: int) -> tuple[int, ...]:
    cols = [range(1, 65), range(1, 65), EDGES, LONG][choose(range(4 if choose(range(4)) == 3 else 3))]
    shape = [choose([n for n in cols if n <= max_numel] or [1])]
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
    over = {}
    for name, targets in pairs.items():
        if choose((False, False, True)):
            cols = case.shape[-1]
            over[name] = (choose(targets), choose((0, 0, 0, 1, 8, cols - 1, cols, cols + 8, math.prod(case.shape))))
    return over


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
    device = tensors["input"].device
    generator = torch.Generator(device).manual_seed(case.seed)
    values = {name: torch.randn(tensor.shape, generator=generator, device=device) for name, tensor in tensors.items()}
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


# --- Checks ---------------------------------------------------------------------------------------------------------------


@dataclass
class Expected:
    """What every form of a call returns, from dense copies of the arguments and compared with fp64."""

    arguments: dict[str, Tensor]
    out: Tensor
    residual_out: Tensor
    rstd: Tensor


def expect(case: Case, arguments: dict[str, Tensor], arena: Arena) -> Expected:
    copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in arguments.items()}
    x, r, w = (copies.get(name) for name in ("input", "residual", "weight"))
    options = (case.eps, case.offset, case.casting_mode)
    with arena.serving():
        if r is None:
            out, rstd = torch.ops.fused.rms_norm_forward(x, w, *options, case.dtypes[2])
            residual_out = x
        else:
            out, residual_out, rstd = torch.ops.fused.add_rms_norm_forward(x, r, w, *options, case.dtypes[2])
    exact = forward(x, r, as_computed(w, x), *options)
    assert_rounds_to(out, exact.out, "out", error=exact.slack)
    assert_rounds_to(rstd, exact.rstd, "rstd")
    assert same_bits(residual_out, exact.residual_out), "residual_out"
    return Expected(copies, out, residual_out, rstd)


def as_computed(weight: Tensor | None, input: Tensor) -> Tensor | None:
    """An fp64 weight counts as what the operators read of it: rounded to the dtype they compute in."""
    return None if weight is None else weight.to(torch.promote_types(torch.float16, accumulation_dtype(input.dtype)))


def check_unchanged(arguments: dict[str, Tensor], expected: Expected) -> None:
    for name, tensor in arguments.items():
        assert same_bits(tensor, expected.arguments[name]), f"{name} was written"


def place(case: Case, arena: Arena, names: Sequence[str], dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    shapes = {name: case.shape[-1:] if name == "weight" else case.shape for name in names}
    extents = {name: case.layouts[name].strides(shapes[name])[1] * dtypes[name].itemsize for name in names}
    room = sum(extents.values()) + 8 * math.prod(case.shape) if case.over else 0
    for name in names:
        target, shift = case.over.get(name, (None, 0))
        over = (tensors[target], shift) if target in tensors and dtypes[target] == dtypes[name] else None
        tensors[name] = arena.place(shapes[name], dtypes[name], case.layouts[name], over=over, room=room)
    return tensors


def check_functional(case: Case, arena: Arena, dtypes: dict[str, torch.dtype]) -> str:
    """Results and gradients through autograd."""
    names = [n for n in ("input", "residual", "weight", "grad_out", "grad_residual_out") if n in dtypes]
    tensors = place(case, arena, names, dtypes)
    fill(case, tensors)
    arguments = {name: tensors[name] for name in names if "grad" not in name}
    expected = expect(case, arguments, arena)

    for tensor, needs in zip(("input", "residual", "weight"), case.needs_grad, strict=True):
        if tensor in arguments:
            arguments[tensor].requires_grad_(needs)
    x, r, w = (arguments.get(name) for name in ("input", "residual", "weight"))
    options = {"offset": case.offset, "casting_mode": case.casting_mode, "out_dtype": case.dtypes[2]}
    with arena.serving():
        if r is None:
            results = [fused.rms_norm(x, w, case.eps, **options)]
        else:
            results = list(fused.add_rms_norm(x, r, w, case.eps, **options))
    for result, name in zip(results, ("out", "residual_out"), strict=False):
        assert same_bits(result, getattr(expected, name)), f"{name} differs from that of dense arguments"
        assert result.is_contiguous(), f"{name} of strides {result.stride()}"
        assert result.numel() == 0 or result.data_ptr() in arena.fresh, f"{name} is no new tensor"
    wanted = {name: tensor for name, tensor in arguments.items() if tensor.requires_grad}
    assert results[0].requires_grad == bool(wanted)
    if r is not None:
        assert results[1].requires_grad == (x.requires_grad or r.requires_grad)

    grad_names = ("grad_out", "grad_residual_out")
    grads = [tensors[name] if used else None for name, used in zip(grad_names, case.used, strict=True)]
    pairs = [
        (result, grad) for result, grad in zip(results, grads, strict=False) if result.requires_grad and grad is not None
    ]
    if pairs:
        outputs, grad_outputs = zip(*pairs, strict=True)
        with arena.serving():
            actual = torch.autograd.grad(outputs, list(wanted.values()), grad_outputs, allow_unused=True)
        dh = grads[1] if len(results) > 1 and results[1].requires_grad else None
        check_gradients(case, dict(zip(wanted, actual, strict=True)), grads[0], dh, expected)
    check_unchanged(arguments, expected)
    return "forward and backward" if pairs else "forward"


def check_gradients(
    case: Case, actual: dict[str, Tensor | None], dy: Tensor | None, dh: Tensor | None, expected: Expected
) -> None:
    x, w = expected.arguments["input"], expected.arguments.get("weight")
    if dy is None:  # residual_out depends on the sum alone
        assert actual.pop("weight", None) is None
        for name, grad in actual.items():
            assert same_bits(grad, dh.to(expected.arguments[name].dtype)), f"grad of {name}"
        return
    exact = backward(dy, dh, expected.residual_out, expected.rstd, as_computed(w, x), case.offset)
    for name, grad in actual.items():
        assert grad is not None, f"no grad of {name}"
        assert grad.dtype == expected.arguments[name].dtype, f"grad of {name}: {grad.dtype}"
        if name == "weight":
            assert_rounds_to(grad, exact.grad_weight, "grad of weight", error=exact.grad_weight_error)
        else:
            assert_rounds_to(grad, exact.grad_input, f"grad of {name}", error=exact.grad_input_error)


def cells(tensor: Tensor) -> Tensor:
    """Where it lies, in units of 2 bytes: one number for each of its elements' units."""
    places = torch.zeros((), dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    units = tensor.element_size() // 2
    return ((places.flatten() + tensor.storage_offset()) * units).unsqueeze(-1).add(torch.arange(units)).flatten()


def meets(a: Tensor, b: Tensor) -> bool:
    return bool(torch.isin(cells(a), cells(b)).any())


def is_one(a: Tensor, b: Tensor) -> bool:
    return a.storage_offset() == b.storage_offset() and all(
        s == t or n == 1 for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True)
    )


def refusal(case: Case, arguments: dict[str, Tensor], results: list[Tensor]) -> bool | None:
    """Whether the call must be refused; None where it may be: strides that are not followed, views in each other's gaps."""
    may = False
    for tensor in (arguments["input"], arguments["residual"], *results):
        may |= case.shape[-1] > 1 and tensor.stride(-1) != 1
    may |= sum(size > 1 for size in case.shape[:-1]) > 2
    for result in results:
        if writable(result).shape != result.shape:
            return True
        for name, argument in arguments.items():
            if case.over and meets(result, argument) and (name == "weight" or not is_one(result, argument)):
                return True
    if case.over and meets(*results):
        return True
    return None if may or case.over else False


def check_into(case: Case, arena: Arena, dtypes: dict[str, torch.dtype]) -> str:
    """Results in the caller's memory, or a refusal that leaves every byte as it was."""
    in_place = case.form == "add_rms_norm_"
    names = [n for n in ("input", "residual", "weight") if n in dtypes]
    tensors = place(case, arena, names if in_place else [*names, "out", "residual_out"], dtypes)
    arguments = {name: tensors[name] for name in names}
    fill(case, arguments)
    expected = expect(case, arguments, arena)
    results = [arguments["input"], arguments["residual"]] if in_place else [tensors["out"], tensors["residual_out"]]
    must_refuse = refusal(case, arguments, results) if 0 not in case.shape else False
    apart = {n: t for n, t in arguments.items() if not any(meets(t, result) for result in results)} if case.over else {}
    if not case.over and not in_place:
        apart = arguments

    options = {"offset": case.offset, "casting_mode": case.casting_mode}
    before = arena.bytes[: arena.used].clone()
    try:
        if in_place:
            fused.add_rms_norm_(*results, arguments.get("weight"), case.eps, **options)
        else:
            x, r, w = (arguments.get(name) for name in ("input", "residual", "weight"))
            fused.add_rms_norm(x, r, w, case.eps, out=(results[0], results[1]), **options)
    except RuntimeError as error:
        assert str(error).startswith(f"{case.form}: expected "), error
        assert must_refuse is not False, f"refused: {error}"
        assert torch.equal(arena.bytes[: arena.used], before), "written, then refused"
        return "refused"
    assert not must_refuse, "not refused"
    assert same_bits(results[0], expected.out), "out differs from the functional form's"
    assert same_bits(results[1], expected.residual_out), "residual_out differs from the functional form's"
    check_unchanged(apart, expected)
    return "forward"


def check(case: Case, arena: Arena) -> str:
    """Raises AssertionError, or says what was done."""
    input, residual, out = case.dtypes
    dtypes = {"input": input, "out": out, "grad_out": out}
    if case.form != "rms_norm":
        dtypes |= {name: residual for name in ("residual", "residual_out", "grad_residual_out")}
    if case.weight_dtype is not None:
        dtypes["weight"] = case.weight_dtype
    with arena:
        if case.form in ("add_rms_norm", "rms_norm"):
            return check_functional(case, arena, dtypes)
        return check_into(case, arena, dtypes)


# --- The program ----------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--seed", type=int, help="of the first example; random where not given")
    parser.add_argument("--json", type=Path, help="where to write the summary")
    options = parser.parse_args()

    first = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"{options.examples} examples on {options.device}, seeds from {first} on", flush=True)
    arena = Arena(options.device, ARENA_BYTES)
    done: Counter[str] = Counter()
    failures = []
    start = time.perf_counter()
    for seed in range(first, first + options.examples):
        choose = random.Random(seed).choice
        case = some_case(choose, LARGE if choose(range(50)) == 0 else SMALL)
        try:
            done[f"{case.form}: {check(case, arena)}"] += 1
        except Exception:
            failures.append(seed)
            print(f"\nseed {seed}: {case}\n{traceback.format_exc()}", flush=True)
            if len(failures) == 20:
                break
    summary = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "torch": torch.__version__,
        "first_seed": first,
        "examples": done.total() + len(failures),
        "failures": failures,
        "seconds": round(time.perf_counter() - start, 1),
        "done": dict(sorted(done.items())),
    }
    print(json.dumps(summary, indent=2))
    if options.json:
        options.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
