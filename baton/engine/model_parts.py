"""The parts of a model that only some families have, read from config.json. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


def positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {key} must be a positive whole number, not {value!r}")
    return value


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads are unpacked from
    `kv_rank` values per token, beside `rope_dim` rotated key values that the heads share."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_rank: int | None

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> "LatentConfig | None":
        if config.get("kv_lora_rank") is None:
            return None
        q_rank = config.get("q_lora_rank")
        return LatentConfig(
            kv_rank=positive(config, "kv_lora_rank"),
            rope_dim=positive(config, "qk_rope_head_dim"),
            nope_dim=positive(config, "qk_nope_head_dim"),
            value_dim=positive(config, "v_head_dim"),
            q_rank=None if q_rank is None else positive(config, "q_lora_rank"),
        )


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in the layers from `first_layer` on. With `num_groups` a token
    chooses among the experts of its `top_groups` best groups only."""

    num_experts: int
    top_k: int
    intermediate_size: int
    num_shared: int = 0
    first_layer: int = 0
    renormalise: bool = False
    scale: float = 1.0
    num_groups: int | None = None
    top_groups: int | None = None

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> "ExpertsConfig | None":
        if config.get("num_local_experts") is not None:  # Mixtral
            return ExpertsConfig(
                num_experts=positive(config, "num_local_experts"),
                top_k=positive(config, "num_experts_per_tok", 2),
                intermediate_size=positive(config, "intermediate_size"),
                renormalise=True,
            )
        if config.get("n_routed_experts") is None:
            return None
        grouped = config.get("n_group") is not None
        return ExpertsConfig(
            num_experts=positive(config, "n_routed_experts"),
            top_k=positive(config, "num_experts_per_tok"),
            intermediate_size=positive(config, "moe_intermediate_size"),
            num_shared=positive(config, "n_shared_experts"),
            first_layer=int(config.get("first_k_dense_replace") or 0),
            scale=float(config.get("routed_scaling_factor", 1.0)),
            num_groups=positive(config, "n_group") if grouped else None,
            top_groups=positive(config, "topk_group") if grouped else None,
        )
