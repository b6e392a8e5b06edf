"""Prepared weights out of a checkpoint: fused products and norms."""

import torch
from torch import Tensor

from baton.engine.layers.norm import LayerNorm, Norm, RMSNorm
from baton.engine.model_config import ModelConfig
from baton.engine.models.checkpoint_names import TensorSource
from baton.engine.ops.activation import Activation
from baton.engine.ops.linear import Linear, activated_linear, gated_linear, linear

Parts = tuple[tuple[str, int], ...]


def fused_linear(
    source: TensorSource, prefix: str, parts: Parts, in_features: int, bias: bool
) -> Linear:
    """One product with the parts' rows, in order."""
    return linear(*_fused(source, prefix, parts, in_features, bias))


def fused_gate_up(
    source: TensorSource,
    prefix: str,
    size: int,
    in_features: int,
    bias: bool,
    activate: Activation,
) -> Activation:
    """gate_proj and up_proj as one product, and what `activate` makes of them."""
    parts = (("gate_proj", size), ("up_proj", size))
    return gated_linear(*_fused(source, prefix, parts, in_features, bias), activate)


def activated(
    source: TensorSource, name: str, shape: tuple[int, int], bias: bool, activate: Activation
) -> Activation:
    """A product and what `activate` makes of it."""
    weight = source(f"{name}.weight", shape)
    return activated_linear(weight, source(f"{name}.bias", shape[:1]) if bias else None, activate)


def _fused(
    source: TensorSource, prefix: str, parts: Parts, in_features: int, bias: bool
) -> tuple[Tensor, Tensor | None]:
    weight = torch.cat(
        [source(f"{prefix}.{name}.weight", (out, in_features)) for name, out in parts]
    )
    biases = [source(f"{prefix}.{name}.bias", (out,)) for name, out in parts] if bias else None
    return weight, torch.cat(biases) if biases else None


def norm(config: ModelConfig, source: TensorSource, name: str) -> Norm:
    """The norm of the hidden size that the family uses."""
    shape = (config.hidden_size,)
    weight = norm_weight(config, source, name, shape)
    if config.layer_norm:
        return LayerNorm(weight, source(f"{name}.bias", shape).float(), config.rms_norm_eps)
    return RMSNorm(weight, config.rms_norm_eps)


def norm_weight(
    config: ModelConfig, source: TensorSource, name: str, shape: tuple[int, ...]
) -> Tensor:
    weight = source(f"{name}.weight", shape).float()
    return weight + config.norm_offset if config.norm_offset else weight
