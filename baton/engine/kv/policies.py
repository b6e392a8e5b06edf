"""Which KV policies a model and its kind of cache can have. No torch."""

from baton.engine.kv_layout import KVLayout
from baton.engine.model_config import ModelConfig
from baton.kv_policy import H2O, POLICIES, KVPolicy, Streaming


def check_policy(policy: KVPolicy, config: ModelConfig, layout: KVLayout) -> None:
    """Raises ValueError, a sentence, when the policy cannot be had."""
    if reason := _refusal(type(policy), config, layout):
        raise ValueError(f"kv_policy {policy.name} cannot be had: {reason}")
    if policy.span > config.max_position_embeddings:
        raise ValueError(
            f"kv_policy {policy}: sinks and window are more than the model's context of "
            f"{config.max_position_embeddings} tokens"
        )


def policies_of(config: ModelConfig, layout: KVLayout) -> tuple[str, ...]:
    """Names of those that can be had."""
    return tuple(n for n, kind in POLICIES.items() if not _refusal(kind, config, layout))


def _refusal(kind: type[KVPolicy], config: ModelConfig, layout: KVLayout) -> str | None:
    if kind is KVPolicy:
        return None
    if "latent" in layout.layer_kinds:
        return f"{config.family} caches latents, whose heads share one token"
    if kind is Streaming:
        if config.rope is None:
            return f"{config.family} has learned positions; sinks need rotary ones"
        if config.widest_window is not None:
            return "every layer of the model has a window of its own"
        return None
    if any(window is not None for window in config.windows):
        return "layers with a window find their tokens by place, and eviction moves them"
    if kind is H2O and layout.quantized is not None:
        return f"tokens of a {layout.dtype} cache share scales and cannot be replaced one by one"
    return None
