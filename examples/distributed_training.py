"""Trains a small decoder on one process or on many: the losses printed are the same.

    python examples/distributed_training.py
    torchrun --nproc-per-node 2 examples/distributed_training.py                      # FSDP2
    torchrun --nproc-per-node 4 examples/distributed_training.py --tensor-parallel 2  # 2 x 2: FSDP2 and TP
    torchrun --nproc-per-node 2 examples/distributed_training.py --ddp

On GPUs where there are any, else on the CPU. docs/distributed.md explains it.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from fused_add_rms_norm import AddRMSNorm

VOCABULARY, HIDDEN, HEADS, LAYERS, LENGTH, BATCH = 64, 64, 4, 2, 32, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # A process of a tensor parallel group has some of the heads.
        q, k, v = (
            project(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Layer(nn.Module):
    """Takes the last branch and the residual stream apart: each norm adds one to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = AddRMSNorm(HIDDEN), Attention()
        self.mlp_norm, self.mlp = AddRMSNorm(HIDDEN), MLP()

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)
        x, residual = self.mlp_norm(self.attention(x), residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = AddRMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting each token from those before it."""
        x, residual = self.embedding(tokens[:, :-1]), None
        for layer in self.layers:
            x, residual = layer(x, residual)
        logits = self.head(self.norm(x, residual)[0])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class SequenceParallelNorm(ParallelStyle):
    """A norm on tokens that are sharded already: a replicated weight is all it needs.

    torch's SequenceParallel knows modules of one argument and would drop the residual.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


def tensor_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    """Between branches tokens are sharded, along the sequence; inside them, heads and features."""
    tokens = Shard(1)
    branch_in = PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(Replicate(),))
    branch_out = RowwiseParallel(output_layouts=tokens, use_local_output=False)
    layer_plan = {
        "attention_norm": SequenceParallelNorm(),
        "attention": branch_in,
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.o": branch_out,
        "mlp_norm": SequenceParallelNorm(),
        "mlp": branch_in,
        "mlp.up": ColwiseParallel(),
        "mlp.down": branch_out,
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, layer_plan)
    plan = {
        "embedding": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=tokens, use_local_output=False
        ),
        "norm": SequenceParallelNorm(),
        "head": ColwiseParallel(input_layouts=tokens, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def fsdp(model: Decoder, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def batch(step: int, device: torch.device) -> Tensor:
    """Sequences to continue: each counts upwards, in steps of its own."""
    generator = torch.Generator().manual_seed(step)
    first, by = torch.randint(VOCABULARY, (2, BATCH, 1), generator=generator)
    return ((first + by * torch.arange(LENGTH + 1)) % VOCABULARY).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, help="processes that share each layer")
    parser.add_argument("--ddp", action="store_true", help="replicate the weights instead of sharding them")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # the same weights everywhere
    model: nn.Module = Decoder().to(device)

    replicas, rank = 1, 0  # of the model, each with its share of the batch
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")
        shape = (dist.get_world_size() // args.tensor_parallel, args.tensor_parallel)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
        replicas, rank = mesh["data"].size(), mesh["data"].get_local_rank()
        if args.tensor_parallel > 1:
            tensor_parallel(model, mesh["tensor"])
        if args.ddp:
            model = nn.parallel.DistributedDataParallel(model)
        else:
            fsdp(model, mesh["data"])

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(args.steps):
        loss = model(batch(step, device).chunk(replicas)[rank])
        loss.backward()
        loss = loss.detach()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"step {step}  loss {loss.item():.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
