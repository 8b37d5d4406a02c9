"""DTensor, FSDP2, tensor parallelism with sequence parallel norms, DDP: many processes give what one gives.

Four processes over gloo on the CPU, two over NCCL on two GPUs. All in fp64: what differs is wrong.
"""

from __future__ import annotations

import copy
import datetime
import functools
import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import fused_add_rms_norm as fused

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed_training.py"
PROCESSES = {"cpu": 4, "cuda": 2}
CHECKS: dict[str, Callable[[torch.device], None]] = {}


def check(function: Callable[[torch.device], None]) -> Callable[[torch.device], None]:
    """Runs in every process of a group."""
    CHECKS[function.__name__] = function
    return function


def assert_same(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


# --- DTensor ------------------------------------------------------------------------------------------------


def tensors(
    device: torch.device, shape=(4, 8, 16), dtype=torch.float64, residual_dtype=torch.float64
) -> list[Tensor]:
    """input, residual, weight, and a gradient of each result: the same in every process."""
    shapes = [
        (shape, dtype),
        (shape, residual_dtype),
        (shape[-1:], dtype),
        (shape, dtype),
        (shape, residual_dtype),
    ]
    return [torch.randn(size, dtype=torch.float64).to(device, kind) for size, kind in shapes]


def step(
    x: Tensor, r: Tensor, w: Tensor, *grads: Tensor, needs: tuple[bool, ...] = (True,) * 3
) -> list[Tensor]:
    """Both results, and the gradient of whatever needs one."""
    leaves = [t.detach().requires_grad_(need) for t, need in zip((x, r, w), needs, strict=True)]
    results = fused.add_rms_norm(*leaves, 1e-5, offset=1.0)
    differentiable = [pair for pair in zip(results, grads, strict=True) if pair[0].requires_grad]
    torch.autograd.backward(*zip(*differentiable, strict=True))
    return [*results, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@functools.cache  # torch.compile fails on a second mesh that is equal to a first, torch's own operators too
def mesh_of(device: torch.device, *shape: int):
    from torch.distributed.device_mesh import init_device_mesh

    shape = shape or (dist.get_world_size(),)
    return init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor")[: len(shape)])


def distributed(args: list[Tensor], mesh, *rows) -> list[Tensor]:
    """DTensors whose rows are placed as said and whose weight is replicated."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    return [distribute_tensor(t, mesh, rows if t.dim() > 1 else [Replicate()] * mesh.ndim) for t in args]


@check
def sharded_rows_stay_where_they_are(device):
    """Forward and backward without a collective; the gradient of the weight is a partial sum of them."""
    from torch.distributed.tensor import Partial, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    mesh, args = mesh_of(device), tensors(device)
    for dim in (0, 1):
        shards = distributed(args, mesh, Shard(dim))
        with CommDebugMode() as communication:
            out, residual_out, dx, dr, dw = step(*shards)
        assert communication.get_total_counts() == 0
        assert {t.placements for t in (out, residual_out, dx, dr)} == {(Shard(dim),)}
        assert dw.placements == (Partial(),)
        assert_same([t.full_tensor() for t in (out, residual_out, dx, dr, dw)], step(*args))


@check
def any_subset_of_gradients_in_any_placement(device):
    """Frozen and trainable weights, one after the other: DTensor caches its decisions."""
    from torch.distributed.tensor import Replicate, Shard

    mesh, args = mesh_of(device), tensors(device)
    subsets = [needs for needs in itertools.product((True, False), repeat=3) if any(needs)]
    for rows, needs in itertools.product((Shard(0), Shard(1), Shard(2), Replicate()), subsets):
        actual = [t.full_tensor() for t in step(*distributed(args, mesh, rows), needs=needs)]
        assert_same(actual, step(*args, needs=needs))


@check
def a_mesh_of_two_dimensions(device):
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh, args = mesh_of(device, dist.get_world_size() // 2, 2), tensors(device)
    for rows in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2):
        for needs in ((True, True, True), (True, True, False), (False, False, True)):
            actual = step(*distributed(args, mesh, *rows), needs=needs)
            assert actual[0].placements == rows
            if needs[2]:
                assert actual[-1].placements == tuple(Partial() if p.is_shard() else p for p in rows)
            assert_same([t.full_tensor() for t in actual], step(*args, needs=needs))


@check
def an_fp32_stream_under_a_16_bit_branch(device):
    from torch.distributed.tensor import Shard

    args = tensors(device, dtype=torch.bfloat16, residual_dtype=torch.float32)
    actual = step(*distributed(args, mesh_of(device), Shard(1)))
    expected = step(*args)
    assert [t.dtype for t in actual] == [t.dtype for t in expected]
    for index in range(4):  # by rows, so bit for bit; the weight's gradient is rounded in each process
        assert torch.equal(actual[index].full_tensor(), expected[index])


@check
def a_sharded_last_dimension_is_redistributed_first(device):
    from torch.distributed.tensor import Shard

    mesh, args = mesh_of(device), tensors(device)
    out, residual_out, *grads = step(*distributed(args, mesh, Shard(2)))
    assert Shard(2) not in (*out.placements, *residual_out.placements)
    assert_same([t.full_tensor() for t in (out, residual_out, *grads)], step(*args))


@check
def rows_that_do_not_divide_evenly(device):
    from torch.distributed.tensor import Shard

    size = dist.get_world_size()
    for rows in (size + 1, 2 * size - 1, 1):
        args = tensors(device, (rows, 3, 16))
        assert_same(
            [t.full_tensor() for t in step(*distributed(args, mesh_of(device), Shard(0)))], step(*args)
        )


@check
def arguments_placed_differently_are_brought_together(device):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, args = mesh_of(device), tensors(device)
    expected = fused.add_rms_norm(*args[:3])
    _, r, w, *_ = distributed(args, mesh, Shard(1))
    pending = DTensor.from_local(
        args[0] / dist.get_world_size(), mesh, [Partial()]
    )  # of a row-wise linear layer
    for x in (distributed(args, mesh, Replicate())[0], distributed(args, mesh, Shard(0))[0], pending):
        assert_same([t.full_tensor() for t in fused.add_rms_norm(x, r, w)], list(expected))


@check
def rms_norm_and_no_weight_and_no_grad(device):
    from torch.distributed.tensor import Shard

    mesh, args = mesh_of(device), tensors(device)
    for x, r, w, *_ in (args, distributed(args, mesh, Shard(0))):
        leaf = x.detach().requires_grad_()
        fused.rms_norm(leaf, w).sin().sum().backward()
        results = [leaf.grad, fused.rms_norm(x, w), fused.rms_norm(x), *fused.add_rms_norm(x, r)]
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                results += fused.add_rms_norm(x, r, w, out_dtype=torch.float64)
        if x is args[0]:
            expected = results
    assert_same([t.full_tensor() for t in results], expected)


@check
def in_place_forms_refuse_dtensors(device):
    """A redistributed temporary would be overwritten in the argument's place."""
    from torch.distributed.tensor import Shard

    args = tensors(device)
    for rows in (Shard(0), Shard(2)):
        x, r, *_ = distributed(args, mesh_of(device), rows)
        with pytest.raises(NotImplementedError, match="does not have a sharding strategy"):
            fused.add_rms_norm_(x, r)
        with pytest.raises(NotImplementedError, match="does not have a sharding strategy"):
            fused.add_rms_norm(x, r, out=(x, r))
        assert torch.equal(x.full_tensor(), args[0]) and torch.equal(r.full_tensor(), args[1])


@check
def compiled_with_dtensors(device):
    from torch.distributed.tensor import Shard

    shards = distributed(tensors(device), mesh_of(device), Shard(1))
    call = torch.compile(lambda *args: fused.add_rms_norm(*args), fullgraph=True, backend="aot_eager")
    gradients = []
    for run in (call, fused.add_rms_norm):
        leaves = [t.detach().requires_grad_() for t in shards[:3]]
        out, residual_out = run(*leaves)
        (out.sin() + residual_out).sum().backward()
        gradients.append([t.grad.full_tensor() for t in leaves])
    assert_same(*gradients)


# --- Models -------------------------------------------------------------------------------------------------


def training_steps(
    training: ModuleType, model: nn.Module, device: torch.device, mesh=None
) -> dict[str, Tensor]:
    """Loss and every gradient of the second of two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        tokens = training.batch(number, device)
        if mesh is not None:
            tokens = tokens.chunk(mesh.size(0))[mesh.get_local_rank(0)]
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        if number == 0:
            optimizer.step()
    results = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()} | {
        "loss": loss.detach()
    }
    if mesh is not None:
        dist.all_reduce(results["loss"])
        results["loss"] /= dist.get_world_size()
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in results.items()}


def assert_trains_as_one_process(device: torch.device, mesh, parallelize: Callable) -> None:
    spec = importlib.util.spec_from_file_location("distributed_training", EXAMPLE)
    training = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(training)
    torch.manual_seed(0)
    model = training.Decoder().double().to(device)
    for module in model.modules():
        if isinstance(module, fused.AddRMSNorm):
            nn.init.normal_(module.weight, 1.0)
    model, other = copy.deepcopy(model), model
    expected = training_steps(training, other, device)
    assert_same(training_steps(training, parallelize(training, model), device, mesh), expected)


@check
def fsdp2(device):
    mesh = mesh_of(device)

    def parallelize(training, model):
        training.fsdp(model, mesh)
        return model

    assert_trains_as_one_process(device, mesh, parallelize)


@check
def tensor_parallelism_with_sequence_parallel_norms(device):
    from torch.distributed.tensor import Shard

    mesh, seen = mesh_of(device, dist.get_world_size() // 2, 2), []

    def parallelize(training, model):
        training.tensor_parallel(model, mesh["tensor"])
        training.fsdp(model, mesh["data"])
        norm = model.layers[1].mlp_norm
        norm.register_forward_hook(lambda _, args, results: seen.extend([*args, *results]))
        return model

    assert_trains_as_one_process(device, mesh, parallelize)
    assert len(seen) == 2 * 4 and all(t.placements == (Shard(1),) for t in seen)


@check
def ddp(device):
    def parallelize(training, model):
        return nn.parallel.DistributedDataParallel(model)

    assert_trains_as_one_process(device, mesh_of(device), parallelize)


@check
def half_the_tokens_each(device):
    """Sequence parallelism by hand, without DTensor: the weight's gradient is to be summed over processes."""
    args = tensors(device)
    *rows, dw = step(
        *(t if t.dim() == 1 else t.chunk(dist.get_world_size(), 1)[dist.get_rank()] for t in args)
    )
    dist.all_reduce(dw)
    expected = step(*args)
    assert_same(dw, expected[-1])
    assert_same(rows[2], expected[2].chunk(dist.get_world_size(), 1)[dist.get_rank()])


# --- Running them -------------------------------------------------------------------------------------------


def process(rank: int, device_type: str, folder: str, failures: dict[str, str]) -> None:
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(PROCESSES[device_type]))
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=PROCESSES[device_type],
        timeout=datetime.timedelta(minutes=2),  # one that fails leaves the others waiting
    )
    found = {}
    for name, function in CHECKS.items():
        torch.manual_seed(0)
        try:
            function(device)
        except Exception:
            found[f"{name}, rank {rank}"] = traceback.format_exc()
    dist.destroy_process_group()
    failures.update(found)  # last, so that gloo's threads are done with their tensors before Python is


def failures_of_all(device_type: str) -> dict[str, str]:
    """All checks in one group of processes: starting them costs more than the checks."""
    with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        failures = manager.dict()
        mp.spawn(process, (device_type, folder, failures), nprocs=PROCESSES[device_type])
        return dict(failures)


@pytest.fixture(scope="module")
def gloo_failures():
    return failures_of_all("cpu")


@pytest.fixture(scope="module")
def nccl_failures():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return failures_of_all("cuda")


def fail_with_any_of(name: str, failures: dict[str, str]) -> None:
    ours = [text for key, text in failures.items() if key.startswith(f"{name}, rank")]
    assert not ours, ours[0]


@pytest.mark.parametrize("name", CHECKS)
def test_processes_on_the_cpu(name, gloo_failures):
    fail_with_any_of(name, gloo_failures)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_two_gpus(name, nccl_failures):
    fail_with_any_of(name, nccl_failures)


def output_of(*command: str) -> str:
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_example_prints_the_losses_of_one_process():
    options = [str(EXAMPLE), "--steps", "2"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    expected = output_of(*options)
    assert len(expected.splitlines()) == 2
    assert output_of(*launch, *options, "--tensor-parallel", "2") == expected


@pytest.mark.parametrize("first", ["fused_add_rms_norm", "torch.distributed.tensor"])
def test_rules_are_there_whichever_is_imported_first(first):
    """And the package does not import DTensor itself, which would cost every user half a second."""
    output_of(
        "-c",
        "import sys\n"
        f"import {first}\n"
        "assert ('torch.distributed.tensor' in sys.modules) == (sys.argv[1] == 'torch.distributed.tensor')\n"
        "import fused_add_rms_norm\n"
        "from torch.distributed.tensor import DTensor\n"
        "import torch\n"
        "rules = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs\n"
        "assert torch.ops.fused.add_rms_norm_backward.default in rules\n",
        first,
    )
