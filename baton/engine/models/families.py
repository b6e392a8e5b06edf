"""The registry of model families: what a family fixes and its config.json leaves unsaid.

All families run through one decoder, so an entry here is data. Adding a family of the same
shape is adding an entry; nothing else in the engine knows a family by name. No torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Windows = tuple[int | None, ...]


def _no_windows(config: Mapping[str, Any], num_layers: int) -> Windows:
    return (None,) * num_layers


def _same_window(config: Mapping[str, Any], num_layers: int) -> Windows:
    """Mistral: every layer has the window. A config without the key means the 4096 of v0.1."""
    return (config.get("sliding_window", 4096),) * num_layers


def _qwen_windows(config: Mapping[str, Any], num_layers: int) -> Windows:
    """Qwen: the window is off by default, and the first `max_window_layers` layers are full."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    kinds = config.get("layer_types")
    if kinds is None:
        full = config.get("max_window_layers", 28)
        return tuple(window if layer >= full else None for layer in range(num_layers))
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers but the model has {num_layers}")
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types holds {sorted(unknown)}, which is not supported")
    if window is None and "sliding_attention" in kinds:
        raise ValueError(
            "layer_types names sliding_attention layers but use_sliding_window or "
            "sliding_window is not set"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


@dataclass(frozen=True)
class Family:
    """`None` for a bias means that config.json decides (`attention_bias`, `mlp_bias`)."""

    architecture: str
    qk_norm: bool = False
    qkv_bias: bool | None = False
    o_bias: bool | None = False
    mlp_bias: bool | None = False
    windows: Callable[[Mapping[str, Any], int], Windows] = _no_windows
    default_head_dim: int | None = None
    default_rope_theta: float = 10000.0


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", qkv_bias=None, o_bias=None, mlp_bias=None),
    "mistral": Family("MistralForCausalLM", windows=_same_window),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, windows=_qwen_windows),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        qk_norm=True,
        qkv_bias=None,
        o_bias=None,
        windows=_qwen_windows,
        default_head_dim=128,
    ),
}
