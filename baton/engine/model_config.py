"""What a model is, read from a Hugging Face `config.json`: sizes, biases, windows, RoPE.

Whatever the decoder would compute wrongly is refused here, by name, before
a weight is read. No torch.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.engine.model_parts import ExpertsConfig, LatentConfig, positive
from baton.engine.models.families import FAMILIES, Family
from baton.engine.models.layer_windows import Windows
from baton.engine.rope_config import RopeConfig

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model. `windows[layer]` is how many tokens, itself included, a token of
    that layer sees; None is all of them."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig | None
    """None: positions have learned embeddings instead."""
    windows: Windows
    window_rope: RopeConfig | None = None
    """The rotary embedding of layers with a window, where it differs."""
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    """"silu" or "gelu_tanh"."""
    gated_mlp: bool = True
    layer_norm: bool = False
    norm_offset: float = 0.0
    sandwich_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    """Factor on the attention logits; None is the usual 1 / root of the head's size."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def widest_window(self) -> int | None:
        """How many tokens a token sees at most; None when some layer sees them all."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if len(windows) == self.num_layers else None

    @property
    def rotary_dim(self) -> int:
        """Leading values of a head (or, with `latent`, of its rotated part) that are rotated."""
        whole = self.head_dim if self.latent is None else self.latent.rope_dim
        return whole if self.rope is None else int(whole * self.rope.partial)

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """What is cached per token and layer: (planes, heads, values). The planes are key and
        value, or the latent alone."""
        if self.latent is not None:
            return 1, 1, self.latent.kv_rank + self.latent.rope_dim
        return 2, self.num_kv_heads, self.head_dim

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.first_layer

    @property
    def num_parameters(self) -> int:
        """Weights of the matrices, tied ones once; norms and biases are left out."""
        layers = sum(self._layer_parameters(layer) for layer in range(self.num_layers))
        embeddings = 1 if self.tie_word_embeddings else 2
        rows = embeddings * self.vocab_size + (self.rope is None) * self.max_position_embeddings
        return layers + rows * self.hidden_size

    def _layer_parameters(self, layer: int) -> int:
        matrices = (3 if self.gated_mlp else 2) * self.hidden_size
        if self.experts is not None and self.has_experts(layer):
            experts = self.experts.num_experts + self.experts.num_shared
            mlp = experts * matrices * self.experts.intermediate_size
            mlp += self.experts.num_experts * self.hidden_size
        else:
            mlp = matrices * self.intermediate_size
        return self._attention_parameters() + mlp

    def _attention_parameters(self) -> int:
        if self.latent is None:
            return self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        m, heads = self.latent, self.num_heads
        q_out = heads * (m.nope_dim + m.rope_dim)
        q = self.hidden_size * q_out
        if m.q_rank is not None:
            q = m.q_rank * (self.hidden_size + q_out)
        down = self.hidden_size * (m.kv_rank + m.rope_dim)
        up = m.kv_rank * heads * (m.nope_dim + m.value_dim)
        return q + down + up + heads * m.value_dim * self.hidden_size

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> "ModelConfig":
        """From the contents of config.json. ValueError says what is unsupported or missing."""
        family_name, family = _family(config)
        config = family.config(config)
        _refuse_quantized(config)
        num_layers = positive(config, "num_hidden_layers")
        num_heads = positive(config, "num_attention_heads")
        hidden_size = positive(config, "hidden_size")
        rope, window_rope = _ropes(config, family)
        latent = LatentConfig.from_hf(config)
        result = ModelConfig(
            family=family_name,
            vocab_size=positive(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=positive(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=positive(config, "num_key_value_heads", num_heads),
            head_dim=_head_dim(config, family, num_heads),
            max_position_embeddings=positive(config, "max_position_embeddings"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=rope,
            windows=family.windows(config, num_layers),
            window_rope=window_rope,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", family.default_tied)),
            qk_norm=family.qk_norm,
            qkv_bias=_bias(family.qkv_bias, config, "attention_bias"),
            o_bias=_bias(family.o_bias, config, "attention_bias"),
            mlp_bias=_bias(family.mlp_bias, config, "mlp_bias"),
            activation=_activation(config),
            gated_mlp=family.gated_mlp,
            layer_norm=family.layer_norm,
            norm_offset=family.norm_offset,
            sandwich_norms=family.sandwich_norms,
            embedding_scale=math.sqrt(hidden_size) if family.scaled_embedding else 1.0,
            attention_scale=_attention_scale(config, latent, rope),
            attention_softcap=config.get("attn_logit_softcapping"),
            logit_softcap=config.get("final_logit_softcapping"),
            latent=latent,
            experts=ExpertsConfig.from_hf(config),
            eos_token_ids=_token_ids(config.get("eos_token_id")),
        )
        result._check()
        return result

    @staticmethod
    def from_dir(path: Path) -> "ModelConfig":
        """From a model folder; `generation_config.json` there may name more end tokens."""
        config = _read_json(path / "config.json")
        generation = path / "generation_config.json"
        if generation.is_file():
            eos = _read_json(generation).get("eos_token_id")
            config = config | ({} if eos is None else {"eos_token_id": eos})
        return ModelConfig.from_hf(config)

    def _check(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_heads}) is not a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, not {self.head_dim}")
        if self.rotary_dim % 2:
            raise ValueError(f"the rotated part of a head must be even, not {self.rotary_dim}")
        experts = self.experts
        if experts is not None and experts.top_k > experts.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({experts.top_k}) is beyond the {experts.num_experts} experts"
            )
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError("sliding_window must be at least 1")


def _family(config: Mapping[str, Any]) -> tuple[str, Family]:
    name = config.get("model_type")
    family = FAMILIES.get(str(name))
    if family is None:
        raise ValueError(
            f"model_type {name!r} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    architectures = config.get("architectures") or [family.architecture]
    if family.architecture not in architectures:
        raise ValueError(
            f"architecture {architectures[0]!r} is not supported; "
            f"a {name} model must be {family.architecture!r}"
        )
    return str(name), family


def _refuse_quantized(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"weights quantized with {method!r} are not supported")


def _activation(config: Mapping[str, Any]) -> str:
    name = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise ValueError(f"hidden_act {name!r} is not supported, only {known}")
    return _ACTIVATIONS[name]


def _ropes(
    config: Mapping[str, Any], family: Family
) -> tuple[RopeConfig | None, RopeConfig | None]:
    if family.learned_positions:
        return None, None
    rope = RopeConfig.from_hf(config, family.default_rope_theta, family.partial_rope)
    local = config.get("window_rope_parameters")
    if local is None:
        return rope, None
    sizes = {"max_position_embeddings": config.get("max_position_embeddings", 0)}
    return rope, RopeConfig.from_hf({**sizes, "rope_parameters": local})


def _attention_scale(
    config: Mapping[str, Any], latent: LatentConfig | None, rope: RopeConfig | None
) -> float | None:
    if latent is not None and rope is not None:
        return float((latent.nope_dim + latent.rope_dim) ** -0.5 * rope.logit_scale)
    scalar = config.get("query_pre_attn_scalar")
    return None if scalar is None else float(scalar**-0.5)


def _head_dim(config: Mapping[str, Any], family: Family, num_heads: int) -> int:
    hidden = positive(config, "hidden_size")
    return positive(config, "head_dim", family.default_head_dim or hidden // num_heads)


def _bias(fixed: bool | None, config: Mapping[str, Any], key: str) -> bool:
    return bool(config.get(key, False)) if fixed is None else fixed


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: the folder is not a model in HF layout") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value
