"""DTensor's rules for the functional operators: rows may be anywhere, a row is in one piece.

Any leading dimension may be sharded; the weight is replicated, and its gradient is a partial sum. A sharded
last dimension is redistributed first, as for torch's own norms. The operators that write in place have no
rule, so DTensor refuses them: it would redistribute an argument into a temporary, to be overwritten and lost.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from torch._ops import OpOverload
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from .decompositions import GRAD_INPUT, GRAD_RESIDUAL, GRAD_WEIGHT, decompose_table

Placements: TypeAlias = list[Placement | None]


def register(op: OpOverload) -> None:
    names = [argument.name for argument in op._schema.arguments]
    is_backward = "output_mask" in names

    def rule(*args: Any, **kwargs: Any) -> list[tuple[Placements, Placements]]:
        """Ways to place (results, arguments) along a dimension of the mesh. What is no tensor has None."""

        def place(rows: Placement, grad_weight: Placement) -> tuple[Placements, Placements]:
            arguments: Placements = [
                None if not hasattr(arg, "placements") else Replicate() if name == "weight" else rows
                for name, arg in zip(names, args, strict=False)
            ]
            if not is_backward:
                return [rows] * len(op._schema.returns), arguments
            gradients = {GRAD_INPUT: rows, GRAD_RESIDUAL: rows, GRAD_WEIGHT: grad_weight}
            return [gradients[bit] if mask & bit else None for bit in gradients], arguments

        spec, mask = args[0], args[-1]
        leading = range(len(spec.shape) - 1)
        return [place(Replicate(), Replicate()), *(place(Shard(dim), Partial()) for dim in leading)]

    register_sharding([op])(rule)


for _op in decompose_table():
    register(_op)
