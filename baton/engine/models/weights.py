"""Prepared weights out of a checkpoint: fused products and norms."""

import torch
from torch import Tensor

from baton.engine.layers.norm import LayerNorm, Norm, RMSNorm
from baton.engine.model_config import ModelConfig
from baton.engine.models.checkpoint_names import TensorSource
from baton.engine.ops.linear import LinearWeight


def fused_linear(
    source: TensorSource,
    prefix: str,
    parts: tuple[tuple[str, int], ...],
    in_features: int,
    bias: bool,
) -> LinearWeight:
    """One weight of the parts' rows, in order."""
    weight = torch.cat(
        [source(f"{prefix}.{name}.weight", (out, in_features)) for name, out in parts]
    )
    biases = [source(f"{prefix}.{name}.bias", (out,)) for name, out in parts] if bias else None
    return LinearWeight(weight, torch.cat(biases) if biases else None)


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
