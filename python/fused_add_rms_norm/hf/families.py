"""The promise: which decoder layers can be patched, by name, and what their norms compute."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A pre-norm decoder layer: both of its adds are followed by a norm.

    Attributes:
        casting_mode, offset: what its norms compute, in the words of :func:`fused_add_rms_norm.add_rms_norm`.
            Checked on the live norms before anything is patched (contract.py).
        first_norm: the norm that follows the MLP's add of the layer before.
        second_norm: the norm that follows the attention's add.
    """

    casting_mode: str = "llama"
    offset: float = 0.0
    first_norm: str = "input_layernorm"
    second_norm: str = "post_attention_layernorm"


_LLAMA = Family()
_GEMMA = Family("gemma", 1.0)
_GEMMA_SANDWICH = Family("gemma", 1.0, second_norm="pre_feedforward_layernorm")  # norm, add, norm

FAMILIES = {
    "ApertusDecoderLayer": Family(first_norm="attention_layernorm", second_norm="feedforward_layernorm"),
    "ArceeDecoderLayer": _LLAMA,
    "BitNetDecoderLayer": _LLAMA,
    "CwmDecoderLayer": _LLAMA,
    "DeepseekV2DecoderLayer": _LLAMA,
    "DeepseekV3DecoderLayer": _LLAMA,
    "Dots1DecoderLayer": _LLAMA,
    "Ernie4_5DecoderLayer": _LLAMA,
    "Ernie4_5_MoeDecoderLayer": _LLAMA,
    "Gemma2DecoderLayer": _GEMMA_SANDWICH,
    "Gemma3DecoderLayer": _GEMMA_SANDWICH,
    "GemmaDecoderLayer": _GEMMA,
    "Glm4DecoderLayer": _LLAMA,
    "Glm4MoeDecoderLayer": _LLAMA,
    "GlmDecoderLayer": _LLAMA,
    "GptOssDecoderLayer": Family("gemma", 0.0),
    "GraniteDecoderLayer": _LLAMA,
    "GraniteMoeDecoderLayer": _LLAMA,
    "GraniteMoeSharedDecoderLayer": _LLAMA,
    "HeliumDecoderLayer": Family("gemma", 0.0),
    "HunYuanDenseV1DecoderLayer": _LLAMA,
    "HunYuanMoEV1DecoderLayer": _LLAMA,
    "Llama4TextDecoderLayer": _LLAMA,
    "LlamaDecoderLayer": _LLAMA,
    "MiniMaxM2DecoderLayer": _LLAMA,
    "Ministral3DecoderLayer": _LLAMA,
    "MinistralDecoderLayer": _LLAMA,
    "MistralDecoderLayer": _LLAMA,
    "MixtralDecoderLayer": _LLAMA,
    "OlmoeDecoderLayer": _LLAMA,
    "Phi3DecoderLayer": _LLAMA,
    "Qwen2DecoderLayer": _LLAMA,
    "Qwen2MoeDecoderLayer": _LLAMA,
    "Qwen3DecoderLayer": _LLAMA,
    "Qwen3MoeDecoderLayer": _LLAMA,
    "Qwen3NextDecoderLayer": _GEMMA,
    "Qwen3_5DecoderLayer": _GEMMA,
    "Qwen3_5MoeDecoderLayer": _GEMMA,
    "SeedOssDecoderLayer": _LLAMA,
    "SmolLM3DecoderLayer": _LLAMA,
}
