"""Every message, in each op, before anything is written."""

from __future__ import annotations

import re

import pytest
import torch

f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16


def make(shape=(3, 8), dtype=f32):
    return torch.randn(*shape).to(dtype) if dtype.is_floating_point else torch.ones(*shape, dtype=dtype)


# what is wrong: (arguments that differ from the good ones, the message). {op} is the op's name.
FORWARD = {
    "no dimension": (
        {"input": torch.tensor(1.0)},
        "{op}: expected input with at least one dimension and a last dimension of at least 1, got shape []",
    ),
    "no columns": (
        {"input": make((3, 0))},
        "{op}: expected input with at least one dimension and a last dimension of at least 1, "
        "got shape [3, 0]",
    ),
    "integer input": (
        {"input": make(dtype=torch.int64)},
        "{op}: expected input of dtype float16, bfloat16, float32 or float64, got Long",
    ),
    "rank of weight": (
        {"weight": make((1, 8))},
        "{op}: expected weight of shape [8] (input's last dimension), got [1, 8]",
    ),
    "length of weight": (
        {"weight": make((16,))},
        "{op}: expected weight of shape [8] (input's last dimension), got [16]",
    ),
    "gathered weight of no elements": (
        {"weight": make((0,))},
        "{op}: expected weight of shape [8] (input's last dimension), got [0]",
    ),
    "integer weight": (
        {"weight": make((8,), torch.int32)},
        "{op}: expected weight of dtype float16, bfloat16, float32 or float64, got Int",
    ),
    "device of weight": (
        {"weight": make((8,)).to("meta")},
        "{op}: expected weight on input's device cpu, got meta",
    ),
    "eps of zero": ({"eps": 0.0}, "{op}: expected a finite eps > 0, got 0"),
    "negative eps": ({"eps": -1e-6}, "{op}: expected a finite eps > 0, got -1e-06"),
    "eps not a number": ({"eps": float("nan")}, "{op}: expected a finite eps > 0, got nan"),
    "infinite eps": ({"eps": float("inf")}, "{op}: expected a finite eps > 0, got inf"),
    "infinite offset": ({"offset": float("inf")}, "{op}: expected a finite offset, got inf"),
    "casting mode": (
        {"casting_mode": "none"},
        "{op}: expected casting_mode 'fp32', 'llama' or 'gemma', got 'none'",
    ),
}
RESIDUAL = {
    "shape of residual": (
        {"residual": make((3, 16))},
        "{op}: expected residual of input's shape [3, 8], got [3, 16]",
    ),
    "residual to broadcast": (
        {"residual": make((1, 8))},
        "{op}: expected residual of input's shape [3, 8], got [1, 8]",
    ),
    "residual of as many elements": (
        {"residual": make((6, 4))},
        "{op}: expected residual of input's shape [3, 8], got [6, 4]",
    ),
    "dtype of residual": (
        {"residual": make(dtype=bf16)},
        "{op}: expected residual of input's dtype float32, got bfloat16",
    ),
    "16-bit residual of another kind": (
        {"input": make(dtype=bf16), "residual": make(dtype=f16)},
        "{op}: expected residual of input's dtype bfloat16 or float32, got float16",
    ),
    "fp64 residual": (
        {"input": make(dtype=bf16), "residual": make(dtype=torch.float64)},
        "{op}: expected residual of input's dtype bfloat16 or float32, got float64",
    ),
    "device of residual": (
        {"residual": make().to("meta")},
        "{op}: expected residual on input's device cpu, got meta",
    ),
}
OUT_DTYPE = {
    "out_dtype": (
        {"out_dtype": f16},
        "{op}: expected out dtype of input float32 or of residual float32, got float16",
    ),
}
OUT = {
    "shape of out": ({"out": make((2, 8))}, "{op}: expected out of input's shape [3, 8], got [2, 8]"),
    "shape of residual_out": (
        {"residual_out": make((2, 8))},
        "{op}: expected residual_out of input's shape [3, 8], got [2, 8]",
    ),
    "dtype of out": (
        {"out": make(dtype=f16)},
        "{op}: expected out dtype of input float32 or of residual float32, got float16",
    ),
    "dtype of residual_out": (
        {"residual_out": make(dtype=f16)},
        "{op}: expected residual_out of residual's dtype float32, got float16",
    ),
    "device of out": ({"out": make().to("meta")}, "{op}: expected out on input's device cpu, got meta"),
}
BACKWARD = {
    "shape of grad_out": (
        {"grad_out": make((2, 8))},
        "expected grad_out of input's shape [3, 8], got [2, 8]",
    ),
    "dtype of grad_out": (
        {"grad_out": make(dtype=f16)},
        "expected grad_out of dtype float32 or float32, got float16",
    ),
    "dtype of grad_residual_out": (
        {"grad_residual_out": make(dtype=f16)},
        "expected grad_residual_out of residual_out's dtype float32, got float16",
    ),
    "input_dtype": (
        {"input_dtype": torch.float64},
        "expected input_dtype of residual_out's dtype float32 or a 16-bit one, got float64",
    ),
    "dtype of rstd": (
        {"rstd": make((3,), f16)},
        "expected rstd of the accumulation dtype float32, got float16",
    ),
    "shape of rstd": ({"rstd": make((4,))}, "expected a contiguous rstd of shape [3], got [4]"),
    "output_mask": ({"output_mask": 8}, "expected output_mask of bits 1, 2 and 4, got 8"),
    "the same gradient twice": (
        {"output_mask": 3},
        "expected output_mask without bit 2 where input and residual have one dtype",
    ),
    "no weight": ({"weight": None}, "expected a weight where its gradient is asked for, got none"),
}

CASES = (
    [("add_rms_norm", *case) for case in (FORWARD | RESIDUAL | OUT_DTYPE).items()]
    + [("add_rms_norm_", *case) for case in (FORWARD | RESIDUAL).items()]
    + [("add_rms_norm_out", *case) for case in (FORWARD | RESIDUAL | OUT).items()]
    + [("rms_norm", *case) for case in (FORWARD | OUT_DTYPE).items()]
    + [("add_rms_norm_backward", *case) for case in BACKWARD.items()]
)


def good_arguments(op: str) -> dict:
    if op == "add_rms_norm_backward":
        return {
            "grad_out": make(), "grad_residual_out": make(), "residual_out": make(), "rstd": make((3,)),
            "weight": make((8,)), "eps": 1e-6, "offset": 0.0, "input_dtype": f32, "output_mask": 5,
        }  # fmt: skip
    arguments = {"input": make(), "weight": make((8,)), "eps": 1e-6, "offset": 0.0, "casting_mode": "fp32"}
    if op != "rms_norm":
        arguments["residual"] = make()
    if op == "add_rms_norm_out":
        arguments |= {"out": make(), "residual_out": make()}
    return arguments


@pytest.mark.parametrize(
    ("op", "name", "case"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_message(op, name, case):
    wrong, message = case
    arguments = good_arguments(op) | wrong
    before = {
        k: v.clone() for k, v in arguments.items() if isinstance(v, torch.Tensor) and v.device.type == "cpu"
    }
    with pytest.raises(RuntimeError, match=re.escape(message.format(op=op))) as raised:
        getattr(torch.ops.fused, op)(**arguments)
    assert op in str(raised.value)
    for key, value in before.items():
        assert torch.equal(arguments[key], value), f"{key} was written"


@pytest.mark.parametrize("op", sorted({case[0] for case in CASES}))
def test_the_good_arguments_are_good(op):
    getattr(torch.ops.fused, op)(**good_arguments(op))


def test_out_and_out_dtype_must_agree():
    import fused_add_rms_norm as fused

    with pytest.raises(RuntimeError, match="expected out of dtype out_dtype"):
        fused.add_rms_norm(make(), make(), out_dtype=f16, out=(make(), make()))


@pytest.mark.gpu
def test_devices_do_not_mix():
    x = torch.randn(3, 8, device="cuda")
    with pytest.raises(RuntimeError, match="expected residual on input's device cuda:0, got cpu"):
        torch.ops.fused.add_rms_norm(x, make())
    with pytest.raises(RuntimeError, match="expected weight on input's device cuda:0, got cpu"):
        torch.ops.fused.add_rms_norm(x, x.clone(), make((8,)))
