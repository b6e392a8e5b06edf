"""What a model is, read from a Hugging Face `config.json`: sizes, biases, windows, RoPE.

Knows both spellings of the RoPE settings (`rope_theta` + `rope_scaling`, and the newer
`rope_parameters`). Whatever the decoder would compute wrongly is refused here, by name, before
a weight is read. No torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.engine.models.families import FAMILIES, Family, Windows

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

    @staticmethod
    def from_hf(config: Mapping[str, Any], default_theta: float = 10000.0) -> "RopeConfig":
        params = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
        kind = params.get("rope_type") or params.get("type") or "default"
        if kind not in ROPE_KINDS:
            raise ValueError(
                f"RoPE scaling {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}"
            )
        if float(params.get("partial_rotary_factor") or _partial(config)) != 1.0:
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
        )


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
    rope: RopeConfig
    windows: Windows
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Weights of the matrices, tied ones once; norms and biases are left out."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        layers = self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)
        embeddings = 1 if self.tie_word_embeddings else 2
        return layers + embeddings * self.vocab_size * self.hidden_size

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> "ModelConfig":
        """From the contents of config.json. ValueError says what is unsupported or missing."""
        family_name, family = _family(config)
        _refuse_unsupported(config)
        num_layers = _positive(config, "num_hidden_layers")
        num_heads = _positive(config, "num_attention_heads")
        result = ModelConfig(
            family=family_name,
            vocab_size=_positive(config, "vocab_size"),
            hidden_size=_positive(config, "hidden_size"),
            intermediate_size=_positive(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_positive(config, "num_key_value_heads", num_heads),
            head_dim=_head_dim(config, family, num_heads),
            max_position_embeddings=_positive(config, "max_position_embeddings"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_hf(config, family.default_rope_theta),
            windows=family.windows(config, num_layers),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=family.qk_norm,
            qkv_bias=_bias(family.qkv_bias, config, "attention_bias"),
            o_bias=_bias(family.o_bias, config, "attention_bias"),
            mlp_bias=_bias(family.mlp_bias, config, "mlp_bias"),
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


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"weights quantized with {method!r} are not supported")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported, only 'silu'")


def _positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {key} must be a positive whole number, not {value!r}")
    return value


def _head_dim(config: Mapping[str, Any], family: Family, num_heads: int) -> int:
    hidden = _positive(config, "hidden_size")
    return _positive(config, "head_dim", family.default_head_dim or hidden // num_heads)


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
