"""RoPE scaling from GGUF metadata to a Hugging Face `rope_parameters` entry.

`linear` and `yarn` are metadata keys. Llama 3 models instead ship `rope_freqs.weight`, one
divisor per frequency; the four parameters they were computed from are recovered and must give
the divisors back, else the file is refused. Position arithmetic itself is the engine's.
"""

import math
from collections.abc import Sequence
from typing import Any

from baton.store.errors import StoreError
from baton.store.gguf_metadata import Metadata

_LLAMA3_CONTEXTS = (8192, 4096, 2048, 16384, 32768, 65536, 131072)
_TOLERANCE = 1e-3
_YARN_USUAL = {
    "attn_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_ext_factor": 1.0,
    "yarn_log_multiplier": 0.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
}


def rope_parameters(metadata: Metadata, head_dim: int, freqs: Sequence[float]) -> dict[str, Any]:
    theta = metadata.real("rope.freq_base", 10000.0)
    entry = _scaling(metadata) if not freqs else _llama3(metadata, theta, head_dim, freqs)
    return {"rope_theta": theta, **entry}


def _scaling(metadata: Metadata) -> dict[str, Any]:
    kind = metadata.text(f"{metadata.architecture}.rope.scaling.type", "none")
    factor = metadata.real("rope.scaling.factor", metadata.real("rope.scale_linear", 1.0))
    if kind == "none" or factor in (0.0, 1.0):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        _refuse_tuned_yarn(metadata)
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": metadata.param(
                "rope.scaling.original_context_length", metadata.param("context_length")
            ),
        }
    raise StoreError(
        f"{metadata.path} scales RoPE by {kind!r}, which is not supported; "
        "get a model with linear, yarn or llama3 scaling, or none."
    )


def _refuse_tuned_yarn(metadata: Metadata) -> None:
    for key, usual in _YARN_USUAL.items():
        if metadata.real(f"rope.scaling.{key}", usual) != usual:
            raise StoreError(
                f"{metadata.path} tunes YaRN by {key}, which is not supported from GGUF; "
                "use the model's Hugging Face directory instead."
            )


def _llama3(
    metadata: Metadata, theta: float, head_dim: int, freqs: Sequence[float]
) -> dict[str, Any]:
    factor = float(f"{max(freqs):.7g}")
    for context in _LLAMA3_CONTEXTS:
        entry = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": context,
        }
        if _same(llama3_divisors(theta, head_dim, factor, context), freqs):
            return {"rope_type": "default"} if factor == 1.0 else entry
    raise StoreError(
        f"{metadata.path} has RoPE frequency factors (rope_freqs.weight) that are not Llama 3's; "
        "use the model's Hugging Face directory instead."
    )


def _same(left: Sequence[float], right: Sequence[float]) -> bool:
    return len(left) == len(right) and all(
        math.isclose(a, b, rel_tol=_TOLERANCE) for a, b in zip(left, right, strict=True)
    )


def llama3_divisors(
    theta: float, head_dim: int, factor: float, context: int, low: float = 1.0, high: float = 4.0
) -> list[float]:
    """What each frequency is divided by: 1 for short waves, `factor` for long"""
    divisors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context / low:
            divisors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
