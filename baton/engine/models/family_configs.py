"""Each family's config.json in the words of Llama's, so that the rest reads one kind.

What a family's variants ask for beyond the decoder is refused here, by name. No torch.
"""

from collections.abc import Mapping
from typing import Any

Config = dict[str, Any]


def as_it_is(config: Mapping[str, Any]) -> Config:
    return dict(config)


def gpt2_config(config: Mapping[str, Any]) -> Config:
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        _refuse(config, key, False)
    _refuse(config, "scale_attn_weights", True)
    hidden = config.get("n_embd")
    return {
        **config,
        "hidden_size": hidden,
        "num_hidden_layers": config.get("n_layer"),
        "num_attention_heads": config.get("n_head"),
        "max_position_embeddings": config.get("n_positions"),
        "intermediate_size": config.get("n_inner") or 4 * (hidden or 0),
        "hidden_act": config.get("activation_function", "gelu_new"),
        "rms_norm_eps": config.get("layer_norm_epsilon", 1e-5),
    }


def phi3_config(config: Mapping[str, Any]) -> Config:
    """In Phi-3's early files "su" and "yarn" are names of longrope."""
    params = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = params.get("rope_type") or params.get("type")
    if kind not in (None, "default"):
        raise ValueError(
            f"RoPE scaling {kind!r} of Phi-3 is not supported; the models with 4k or 8k of "
            "context have none"
        )
    return dict(config)


def gemma2_config(config: Mapping[str, Any]) -> Config:
    _refuse(config, "use_bidirectional_attention", False)
    return {
        **config,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": config.get("query_pre_attn_scalar", 256),
        "attn_logit_softcapping": config.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": config.get("final_logit_softcapping", 30.0),
    }


def gemma3_config(config: Mapping[str, Any]) -> Config:
    """Layers with a window have a RoPE of their own. Softcaps are read but never applied by
    the reference to attention, so one there is refused."""
    _refuse(config, "use_bidirectional_attention", False)
    _refuse(config, "attn_logit_softcapping", None)
    ropes = config.get("rope_parameters") or {}
    full = dict(ropes.get("full_attention") or {})
    local = dict(ropes.get("sliding_attention") or {})
    local.setdefault("rope_theta", config.get("rope_local_base_freq", 10_000.0))
    return {
        **config,
        "sliding_window_pattern": config.get("sliding_window_pattern", 6),
        "query_pre_attn_scalar": config.get("query_pre_attn_scalar", 256),
        "rope_parameters": full,
        "window_rope_parameters": local,
    }


def deepseek_v2_config(config: Mapping[str, Any]) -> Config:
    _refuse(config, "norm_topk_prob", False)
    _refuse(config, "scoring_func", "softmax")
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method {method!r} is not supported")
    grouped = method == "group_limited_greedy"
    return {
        **config,
        # Every head has keys and values of its own, unpacked from the shared latent.
        "num_key_value_heads": config.get("num_attention_heads"),
        "head_dim": config.get("qk_rope_head_dim"),
        "n_group": config.get("n_group") if grouped else None,
        "topk_group": config.get("topk_group") if grouped else None,
    }


def _refuse(config: Mapping[str, Any], key: str, only: Any) -> None:
    value = config.get(key)
    if value is not None and value != only:
        raise ValueError(f"{key} {value!r} is not supported, only {only!r}")
