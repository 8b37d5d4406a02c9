"""Random calls of the operators against reference.py. In test_fuzz.py hypothesis chooses them; as a program,

    python tests/fuzz.py --device cuda --examples 20000 --json summary.json

a seeded generator does, until so many have gone through forward and backward. A failure prints its seed:
`--seed SEED --examples 1` repeats it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from arena import Arena, same_bits, writable
from fuzz_cases import Case, fill, some_case
from reference import accumulation_dtype, assert_rounds_to, backward, forward
from torch import Tensor

import fused_add_rms_norm as fused

Dtypes = dict[str, torch.dtype]

SMALL, LARGE = 10_000, 1_100_000  # elements of a tensor
ARENA_BYTES = 256 << 20


@dataclass
class Expected:
    """What every form of a call returns, from dense copies of the arguments and compared with fp64.

    All of it on the CPU, which is done with tensors this small before a GPU has been asked.
    """

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
    on_cpu = {name: tensor.cpu() for name, tensor in copies.items()}
    out, residual_out, rstd = out.cpu(), residual_out.cpu(), rstd.cpu()
    x, r, w = (on_cpu.get(name) for name in ("input", "residual", "weight"))
    exact = forward(x, r, as_computed(w, x), *options)
    assert_rounds_to(out, exact.out, "out", error=exact.slack)
    assert_rounds_to(rstd, exact.rstd, "rstd")
    assert same_bits(residual_out, exact.residual_out), "residual_out"
    return Expected(on_cpu, out, residual_out, rstd)


def as_computed(weight: Tensor | None, input: Tensor) -> Tensor | None:
    """The weight as the operators read it: an fp64 one is rounded to the dtype they compute in."""
    return None if weight is None else weight.to(accumulation_dtype(input.dtype))


def check_unchanged(arguments: dict[str, Tensor], expected: Expected) -> None:
    for name, tensor in arguments.items():
        assert same_bits(tensor, expected.arguments[name]), f"{name} was written"


def place(case: Case, arena: Arena, names: Sequence[str], dtypes: Dtypes) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    shapes = {name: case.shape[-1:] if name == "weight" else case.shape for name in names}
    extents = {name: case.layouts[name].strides(shapes[name])[1] * dtypes[name].itemsize for name in names}
    room = sum(extents.values()) + 8 * math.prod(case.shape) if case.over else 0
    for name in names:
        target, shift = case.over.get(name, (None, 0))
        over = (tensors[target], shift) if target in tensors and dtypes[target] == dtypes[name] else None
        tensors[name] = arena.place(shapes[name], dtypes[name], case.layouts[name], over=over, room=room)
    return tensors


def check_functional(case: Case, arena: Arena, dtypes: Dtypes) -> str:
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
        (t, grad) for t, grad in zip(results, grads, strict=False) if t.requires_grad and grad is not None
    ]
    if pairs:
        outputs, grad_outputs = zip(*pairs, strict=True)
        with arena.serving():
            actual = torch.autograd.grad(outputs, list(wanted.values()), grad_outputs, allow_unused=True)
        dh = grads[1] if len(results) > 1 and results[1].requires_grad else None
        actual = [None if grad is None else grad.cpu() for grad in actual]
        dy, dh = (None if grad is None else grad.cpu() for grad in (grads[0], dh))
        check_gradients(case, dict(zip(wanted, actual, strict=True)), dy, dh, expected)
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
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    units = tensor.element_size() // 2
    first = (places.flatten() + tensor.storage_offset()) * units
    return (first.unsqueeze(-1) + torch.arange(units)).flatten()


def meets(a: Tensor, b: Tensor) -> bool:
    return bool(torch.isin(cells(a), cells(b)).any())


def is_one(a: Tensor, b: Tensor) -> bool:
    return a.storage_offset() == b.storage_offset() and all(
        s == t or n == 1 for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True)
    )


def refusal(case: Case, arguments: dict[str, Tensor], results: list[Tensor]) -> bool | None:
    """Whether the call must be refused; None where it may be: strides not followed, views in gaps."""
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


def check_into(case: Case, arena: Arena, dtypes: Dtypes) -> str:
    """Results in the caller's memory, or a refusal that leaves every byte as it was."""
    in_place = case.form == "add_rms_norm_"
    names = [n for n in ("input", "residual", "weight") if n in dtypes]
    tensors = place(case, arena, names if in_place else [*names, "out", "residual_out"], dtypes)
    arguments = {name: tensors[name] for name in names}
    fill(case, arguments)
    expected = expect(case, arguments, arena)
    results = [tensors[n] for n in (("input", "residual") if in_place else ("out", "residual_out"))]
    must_refuse = refusal(case, arguments, results) if 0 not in case.shape else False
    stay = {n: t for n, t in arguments.items() if not any(t is result for result in results)}
    if case.over:
        stay = {n: t for n, t in stay.items() if not any(meets(t, result) for result in results)}

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
    check_unchanged(stay, expected)
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


# --- The program ------------------------------------------------------------------------------------------


def run(first: int, examples: int, device: str, deadline: float) -> tuple[Counter[str], list[int]]:
    """What was done, how often, and the seeds that failed."""
    arena = Arena(device, ARENA_BYTES)
    done: Counter[str] = Counter()
    both, failures = 0, []
    for seed in itertools.count(first):
        choose = random.Random(seed).choice
        torch.set_num_threads(choose((1, 1, 1, 2)))  # as a rule one: the other processes have the other cores
        case = some_case(choose, LARGE if choose(range(50)) == 0 else SMALL)
        try:
            outcome = check(case, arena)
            done[f"{case.form}: {outcome}"] += 1
            both += outcome == "forward and backward"
        except Exception:
            failures.append(seed)
            print(f"\nseed {seed}: {case}\n{traceback.format_exc()}", flush=True)
        if both + len(failures) >= examples or len(failures) == 20 or time.time() > deadline:
            break
    return done, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--examples", type=int, default=20_000, help="that go through forward and backward")
    parser.add_argument("--seed", type=int, help="of the first example; random where not given")
    parser.add_argument(
        "--jobs", type=int, help="processes, each with a part of the examples: one a core, four on a GPU"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which it ends in any case")
    parser.add_argument("--json", type=Path, help="where to write the summary")
    parser.add_argument("--commit", help="what is tested, for the summary")
    options = parser.parse_args()

    first = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"{options.examples} examples on {options.device}, seeds from {first} on", flush=True)
    start = time.time()
    cores = len(os.sched_getaffinity(0))
    on_gpu = options.device.startswith("cuda")
    jobs = min(options.jobs or (min(cores, 4) if on_gpu else cores), options.examples)
    part = math.ceil(options.examples / jobs)
    arguments = (options.device, start + options.seconds)
    if jobs == 1:
        parts = [run(first, part, *arguments)]
    else:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            # Ten seeds an example are more than are ever passed over.
            parts = pool.starmap(run, [(first + i * 10 * part, part, *arguments) for i in range(jobs)])
    done = sum((done for done, _ in parts), Counter[str]())
    failures = [seed for _, failed in parts for seed in failed]
    summary = {
        "commit": options.commit,
        "device": torch.cuda.get_device_name(options.device) if on_gpu else options.device,
        "torch": torch.__version__,
        "first_seed": first,
        "examples": done.total() + len(failures),
        "forward_and_backward": sum(n for what, n in done.items() if what.endswith("forward and backward")),
        "failures": failures,
        "seconds": round(time.time() - start, 1),
        "done": dict(sorted(done.items())),
    }
    print(json.dumps(summary, indent=2))
    if options.json:
        options.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
