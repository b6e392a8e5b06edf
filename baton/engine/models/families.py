"""The registry of model families: what a family fixes and its config.json leaves unsaid.

All families run through one decoder, so an entry here is data. Nothing else in the engine knows
a family by name, except `checkpoint_names`, which knows how a family calls its weights. No torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.engine.models.family_configs import (
    Config,
    as_it_is,
    deepseek_v2_config,
    gemma2_config,
    gemma3_config,
    gpt2_config,
    phi3_config,
)
from baton.engine.models.layer_windows import (
    Windows,
    no_windows,
    optional_window,
    qwen_windows,
    same_window,
    windows_by_layer_type,
)


@dataclass(frozen=True)
class Family:
    """`None` for a bias means that config.json decides (`attention_bias`, `mlp_bias`).
    `config` puts a config.json of the family into Llama's words and refuses its variants."""

    architecture: str
    config: Callable[[Mapping[str, Any]], Config] = as_it_is
    qk_norm: bool = False
    qkv_bias: bool | None = False
    o_bias: bool | None = False
    mlp_bias: bool | None = False
    windows: Callable[[Mapping[str, Any], int], Windows] = no_windows
    default_head_dim: int | None = None
    default_rope_theta: float = 10000.0
    partial_rope: bool = False
    default_tied: bool = False
    layer_norm: bool = False
    """Norms subtract the mean and have a bias, instead of RMS norms."""
    norm_offset: float = 0.0
    """Added to the norms' stored weights."""
    sandwich_norms: bool = False
    """Norms also after attention and after the MLP, before the residual sum."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the root of the hidden size."""
    learned_positions: bool = False
    gated_mlp: bool = True


_GEMMA: Mapping[str, Any] = {
    "qkv_bias": None,
    "o_bias": None,
    "default_head_dim": 256,
    "default_tied": True,
    "norm_offset": 1.0,
    "scaled_embedding": True,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", qkv_bias=None, o_bias=None, mlp_bias=None),
    "mistral": Family("MistralForCausalLM", windows=same_window),
    "mixtral": Family(
        "MixtralForCausalLM", windows=optional_window, default_rope_theta=1_000_000.0
    ),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, windows=qwen_windows),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        qk_norm=True,
        qkv_bias=None,
        o_bias=None,
        windows=qwen_windows,
        default_head_dim=128,
    ),
    "phi3": Family("Phi3ForCausalLM", phi3_config, windows=optional_window, partial_rope=True),
    "gpt2": Family(
        "GPT2LMHeadModel",
        gpt2_config,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        default_tied=True,
        layer_norm=True,
        learned_positions=True,
        gated_mlp=False,
    ),
    "gemma": Family("GemmaForCausalLM", **_GEMMA),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        gemma2_config,
        windows=windows_by_layer_type,
        sandwich_norms=True,
        **_GEMMA,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        gemma3_config,
        windows=windows_by_layer_type,
        qk_norm=True,
        sandwich_norms=True,
        default_rope_theta=1_000_000.0,
        **_GEMMA,
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM", deepseek_v2_config, qkv_bias=None, o_bias=None, mlp_bias=None
    ),
}
