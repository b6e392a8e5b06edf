"""Rotary embedding as a Hugging Face `config.json` describes it, in both spellings
(`rope_theta` + `rope_scaling`, and the newer `rope_parameters`). No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `dynamic` is plain RoPE up to `max_position_embeddings`, which is as far
    as a sequence may grow: beyond it the angles of cached keys would depend on later tokens."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    partial: float = 1.0
    """Share of each head, from its beginning, that is rotated."""

    @staticmethod
    def from_hf(
        config: Mapping[str, Any], default_theta: float = 10000.0, may_be_partial: bool = False
    ) -> "RopeConfig":
        params = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
        kind = params.get("rope_type") or params.get("type") or "default"
        if kind not in ROPE_KINDS:
            raise ValueError(
                f"RoPE scaling {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}"
            )
        partial = float(params.get("partial_rotary_factor") or _partial(config))
        if partial != 1.0 and not may_be_partial:
            raise ValueError("partial_rotary_factor other than 1 is not supported")
        top = config.get("original_max_position_embeddings")
        original = params.get("original_max_position_embeddings") or top
        return RopeConfig(
            kind=kind,
            theta=float(params.get("rope_theta") or config.get("rope_theta") or default_theta),
            factor=_factor(kind, params, config, original),
            original_max_position=int(original or config.get("max_position_embeddings", 0)),
            low_freq_factor=float(_needed(params, "low_freq_factor", kind, "llama3", 1.0)),
            high_freq_factor=float(_needed(params, "high_freq_factor", kind, "llama3", 4.0)),
            beta_fast=float(params.get("beta_fast") or 32),
            beta_slow=float(params.get("beta_slow") or 1),
            truncate=bool(params.get("truncate", True)),
            mscale=float(params.get("mscale") or 0),
            mscale_all_dim=float(params.get("mscale_all_dim") or 0),
            attention_factor=params.get("attention_factor"),
            partial=partial,
        )

    @property
    def logit_scale(self) -> float:
        """DeepSeek's factor on the attention logits of a stretched context, beside the one on
        cosine and sine."""
        if self.kind == "default" or self.factor <= 1 or not self.mscale_all_dim:
            return 1.0
        return (0.1 * self.mscale_all_dim * math.log(self.factor) + 1.0) ** 2


def _partial(config: Mapping[str, Any]) -> float:
    value = config.get("partial_rotary_factor")
    return 1.0 if value is None else float(value)


def _needed(params: Mapping[str, Any], key: str, kind: str, needed_by: str, other: float) -> Any:
    if kind == needed_by and key not in params:
        raise ValueError(f"RoPE scaling {kind!r} needs {key!r}")
    return params.get(key, other)


def _factor(
    kind: str, params: Mapping[str, Any], config: Mapping[str, Any], original: int | None
) -> float:
    factor = params.get("factor")
    if factor is None and kind == "yarn" and original:
        factor = config["max_position_embeddings"] / original
    if factor is None and kind != "default":
        raise ValueError(f"RoPE scaling {kind!r} needs 'factor'")
    return float(factor or 1.0)
