"""A tiny model of every supported family: upstream's real classes, random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch.utils._pytree import tree_flatten

from fused_add_rms_norm import hf

LAYERS = 2
VOCAB = 96

_TINY: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_MOE: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_SHARED_EXPERT: dict[str, Any] = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=32,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,  # one dense layer, one of experts
)
_DEEPSEEK: dict[str, Any] = dict(
    _SHARED_EXPERT,
    num_key_value_heads=4,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    head_dim=8,
)
_LINEAR_ATTENTION: dict[str, Any] = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)

# Decoder layer -> (causal LM, config, what differs from _TINY).
ZOO: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ApertusDecoderLayer": ("ApertusForCausalLM", "ApertusConfig", {}),
    "ArceeDecoderLayer": ("ArceeForCausalLM", "ArceeConfig", {}),
    "BitNetDecoderLayer": ("BitNetForCausalLM", "BitNetConfig", {}),
    "CwmDecoderLayer": ("CwmForCausalLM", "CwmConfig", {}),
    "DeepseekV2DecoderLayer": ("DeepseekV2ForCausalLM", "DeepseekV2Config", _DEEPSEEK),
    "DeepseekV3DecoderLayer": ("DeepseekV3ForCausalLM", "DeepseekV3Config", _DEEPSEEK),
    "Dots1DecoderLayer": ("Dots1ForCausalLM", "Dots1Config", _SHARED_EXPERT),
    "Ernie4_5DecoderLayer": ("Ernie4_5ForCausalLM", "Ernie4_5Config", {}),
    "Ernie4_5_MoeDecoderLayer": (
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=32),
    ),
    "Gemma2DecoderLayer": ("Gemma2ForCausalLM", "Gemma2Config", dict(sliding_window=16)),
    "Gemma3DecoderLayer": ("Gemma3ForCausalLM", "Gemma3TextConfig", dict(sliding_window=16)),
    "GemmaDecoderLayer": ("GemmaForCausalLM", "GemmaConfig", {}),
    "Glm4DecoderLayer": ("Glm4ForCausalLM", "Glm4Config", {}),
    "Glm4MoeDecoderLayer": ("Glm4MoeForCausalLM", "Glm4MoeConfig", _SHARED_EXPERT),
    "GlmDecoderLayer": ("GlmForCausalLM", "GlmConfig", {}),
    "GptOssDecoderLayer": (
        "GptOssForCausalLM",
        "GptOssConfig",
        dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
    ),
    "GraniteDecoderLayer": ("GraniteForCausalLM", "GraniteConfig", dict(residual_multiplier=0.22)),
    "GraniteMoeDecoderLayer": (
        "GraniteMoeForCausalLM",
        "GraniteMoeConfig",
        dict(num_local_experts=4, num_experts_per_tok=2, residual_multiplier=0.22),
    ),
    "GraniteMoeSharedDecoderLayer": (
        "GraniteMoeSharedForCausalLM",
        "GraniteMoeSharedConfig",
        dict(num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32),
    ),
    "HeliumDecoderLayer": ("HeliumForCausalLM", "HeliumConfig", {}),
    "HunYuanDenseV1DecoderLayer": ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", {}),
    "HunYuanMoEV1DecoderLayer": (
        "HunYuanMoEV1ForCausalLM",
        "HunYuanMoEV1Config",
        dict(num_experts=4, moe_topk=2),
    ),
    "Llama4TextDecoderLayer": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        dict(
            num_local_experts=2,
            intermediate_size_mlp=96,
            interleave_moe_layer_step=2,
            attention_chunk_size=16,
        ),
    ),
    "LlamaDecoderLayer": ("LlamaForCausalLM", "LlamaConfig", {}),
    "MiniMaxM2DecoderLayer": (
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2Config",
        dict(num_local_experts=4, num_experts_per_tok=2),
    ),
    "Ministral3DecoderLayer": ("Ministral3ForCausalLM", "Ministral3Config", {}),
    "MinistralDecoderLayer": ("MinistralForCausalLM", "MinistralConfig", dict(sliding_window=16)),
    "MistralDecoderLayer": ("MistralForCausalLM", "MistralConfig", dict(sliding_window=16)),
    "MixtralDecoderLayer": ("MixtralForCausalLM", "MixtralConfig", dict(num_local_experts=4)),
    "OlmoeDecoderLayer": ("OlmoeForCausalLM", "OlmoeConfig", dict(num_experts=4, num_experts_per_tok=2)),
    "Phi3DecoderLayer": ("Phi3ForCausalLM", "Phi3Config", {}),
    "Qwen2DecoderLayer": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "Qwen2MoeDecoderLayer": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        dict(_MOE, shared_expert_intermediate_size=32),
    ),
    "Qwen3DecoderLayer": ("Qwen3ForCausalLM", "Qwen3Config", {}),
    "Qwen3MoeDecoderLayer": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _MOE),
    "Qwen3NextDecoderLayer": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        dict(_MOE, **_LINEAR_ATTENTION, shared_expert_intermediate_size=32),
    ),
    "Qwen3_5DecoderLayer": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _LINEAR_ATTENTION),
    "Qwen3_5MoeDecoderLayer": (
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        dict(_MOE, **_LINEAR_ATTENTION, shared_expert_intermediate_size=32),
    ),
    "SeedOssDecoderLayer": ("SeedOssForCausalLM", "SeedOssConfig", {}),
    "SmolLM3DecoderLayer": ("SmolLM3ForCausalLM", "SmolLM3Config", {}),
}


def tiny(layer: str = "LlamaDecoderLayer", **overrides: Any) -> transformers.PreTrainedModel:
    """A model of the family of `layer`, in eval mode; its norm weights are random too, never ones."""
    model_name, config_name, changes = ZOO[layer]
    config = getattr(transformers, config_name)(**{**_TINY, **changes, **overrides})
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=0.8, std=0.3)
    return model.eval()


def tokens(batch: int = 2, length: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def run(model: torch.nn.Module, **kwargs: Any) -> tuple[Any, int]:
    """What the model returns for some tokens, and how many adds were fused."""
    with torch.no_grad(), hf.count() as fused:
        output = model(tokens(), **kwargs)
    return output, fused.adds


def assert_same(actual: Any, expected: Any) -> None:
    """Equal, tensors but for the order of fp32 sums."""
    leaves, structure = tree_flatten(actual)
    expected_leaves, expected_structure = tree_flatten(expected)
    assert structure == expected_structure
    for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
        if isinstance(expected_leaf, torch.Tensor):
            assert type(leaf) is type(expected_leaf)
            torch.testing.assert_close(leaf, expected_leaf, rtol=2e-5, atol=2e-5)
        else:
            assert leaf == expected_leaf


def gradients(model: torch.nn.Module, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of every parameter, after one training step's backward."""
    torch.manual_seed(0)  # for dropout
    model.zero_grad()
    model(input_ids, labels=input_ids, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
