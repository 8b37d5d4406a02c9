"""FSDP2 and tensor parallelism: two processes over gloo on the CPU, two GPUs where there are."""

import datetime
import os
import tempfile
import traceback

import pytest
import torch
import torch.multiprocessing as mp
from hf_zoo import LAYERS, assert_same, gradients, tiny, tokens

from fused_add_rms_norm import hf

ALL = 2 * LAYERS


def shard(model, device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def fsdp(device, patch_first, train):
    """Sharded and patched, every gradient and hidden state is that of the unsharded, unpatched model."""
    model = tiny().to(device).train(train)
    ids = tokens().to(device)
    if train:
        expected = gradients(model, ids)
    else:
        with torch.no_grad():
            expected = model(ids, output_hidden_states=True).hidden_states
    if patch_first:
        hf.patch(model)
    shard(model, device)
    report = hf.patch(model)
    assert report.fused_adds == ALL, report
    with hf.count() as fused:
        if train:
            model.zero_grad()
            model(ids, labels=ids, use_cache=False).loss.backward()
        else:
            with torch.no_grad():
                model(ids)
    assert fused.adds == ALL, fused
    if train:
        actual = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    else:
        with torch.no_grad():
            actual = model(ids, output_hidden_states=True).hidden_states
    assert_same(actual, expected)
    if patch_first:
        with pytest.raises(RuntimeError, match="cannot unpatch FSDP"):
            hf.unpatch(model)
    else:
        hf.unpatch(model)
        with torch.no_grad(), hf.count() as fused:
            model(ids)
        assert fused.adds == 0


def fsdp_of_the_norms(device):
    """Norms sharded on their own unshard in their hooks: they run as upstream's."""
    from torch.distributed.fsdp import fully_shard

    model, ids = tiny().to(device), tokens().to(device)
    with torch.no_grad():
        expected = model(ids).logits
    for layer in model.model.layers:
        fully_shard(layer.input_layernorm)
    shard(model, device)
    hf.patch(model)
    with torch.no_grad(), hf.count() as fused:
        assert_same(model(ids).logits, expected)
    assert fused.adds == ALL - 1


def tensor_parallel(device, folder):
    import transformers

    model, ids = tiny().to(device), tokens().to(device)
    with torch.no_grad():
        expected = model(ids).logits
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(folder)
    torch.distributed.barrier()
    sharded = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    weights = [each.model.layers[0].mlp.up_proj.weight for each in (sharded, model)]
    assert weights[0].to_local().numel() * 2 == weights[1].numel()
    hf.patch(sharded)
    with torch.no_grad(), hf.count() as fused:
        assert_same(sharded(ids).logits, expected)
    assert fused.adds == ALL


FOLDER = object()  # a folder that both processes see

CHECKS = {
    "FSDP2, patch then shard, training": (fsdp, True, True),
    "FSDP2, shard then patch, training": (fsdp, False, True),
    "FSDP2, patch then shard, inference": (fsdp, True, False),
    "FSDP2, shard then patch, inference": (fsdp, False, False),
    "FSDP2 of the norms": (fsdp_of_the_norms,),
    "tensor parallelism": (tensor_parallel, FOLDER),
}


def process(rank, device_type, folder, failures):
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0"
    )
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(minutes=2),  # one that fails leaves the other waiting
    )
    found = {}
    for name, (check, *arguments) in CHECKS.items():
        try:
            check(device, *[folder if argument is FOLDER else argument for argument in arguments])
        except Exception:
            found[f"{name}, rank {rank}"] = traceback.format_exc()
    torch.distributed.destroy_process_group()
    failures.update(found)  # last, so that gloo's threads are done with their tensors before Python is


def run_two(device_type):
    with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        failures = manager.dict()
        mp.spawn(process, (device_type, folder, failures), nprocs=2)
        return dict(failures)


@pytest.fixture(scope="module")
def gloo_failures():
    """All checks in one pair of processes: starting them costs more than the checks."""
    return run_two("cpu")


@pytest.mark.parametrize("name", CHECKS)
def test_two_processes_on_the_cpu(name, gloo_failures):
    failures = [text for key, text in gloo_failures.items() if key.startswith(name + ", rank")]
    assert not failures, failures[0]


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def nccl_failures():
    return run_two("cuda")


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("name", CHECKS)
def test_two_gpus(name, nccl_failures):
    failures = [text for key, text in nccl_failures.items() if key.startswith(name + ", rank")]
    assert not failures, failures[0]


@pytest.mark.gpu
@two_gpus
def test_accelerate_device_map_over_two_gpus():
    accelerate = pytest.importorskip("accelerate")
    device = torch.device("cuda", 0)
    model, ids = tiny().to(device), tokens().to(device)
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True)
    first = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.layers.0"], 0)
    second = dict.fromkeys(["model.layers.1", "model.norm", "lm_head"], 1)
    model = accelerate.dispatch_model(model, first | second)
    hf.patch(model)
    with torch.no_grad(), hf.count() as fused:
        logits = model(ids).logits
    assert_same(logits.to(device), expected.logits)
    assert fused.adds == ALL - 1  # the one between the devices
    with torch.no_grad():
        hidden_states = model(ids, output_hidden_states=True).hidden_states
    assert_same([state.to(device) for state in hidden_states], list(expected.hidden_states))
