"""How many tokens each layer sees, as the families' config.json says it. No torch."""

from collections.abc import Mapping
from typing import Any

Windows = tuple[int | None, ...]
"""Per layer; None is all of them."""


def no_windows(config: Mapping[str, Any], num_layers: int) -> Windows:
    return (None,) * num_layers


def same_window(config: Mapping[str, Any], num_layers: int) -> Windows:
    """Mistral: every layer has the window. A config without the key means the 4096 of v0.1."""
    return (config.get("sliding_window", 4096),) * num_layers


def optional_window(config: Mapping[str, Any], num_layers: int) -> Windows:
    return (config.get("sliding_window"),) * num_layers


def qwen_windows(config: Mapping[str, Any], num_layers: int) -> Windows:
    """Qwen: the window is off by default, and the first `max_window_layers` layers are full."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    kinds = config.get("layer_types")
    if kinds is None:
        full = config.get("max_window_layers", 28)
        return tuple(window if layer >= full else None for layer in range(num_layers))
    _check_kinds(kinds, num_layers)
    if window is None and "sliding_attention" in kinds:
        raise ValueError(
            "layer_types names sliding_attention layers but use_sliding_window or "
            "sliding_window is not set"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def windows_by_layer_type(config: Mapping[str, Any], num_layers: int) -> Windows:
    """Gemma: `layer_types` or, in older files, every `sliding_window_pattern`-th layer is full."""
    window, every = config.get("sliding_window", 4096), config["sliding_window_pattern"]
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(window if (layer + 1) % every else None for layer in range(num_layers))
    _check_kinds(kinds, num_layers)
    if window is None and "sliding_attention" in kinds:
        raise ValueError("layer_types names sliding_attention layers but sliding_window is not set")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _check_kinds(kinds: list[str], num_layers: int) -> None:
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers but the model has {num_layers}")
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types holds {sorted(unknown)}, which is not supported")
