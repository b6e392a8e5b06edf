"""Angles of the rotary embedding, with the scaling rules that stretch a model's context.

The angle of a token depends on its position alone, so cached keys stay valid whoever reads
them; the one rule that breaks this (dynamic scaling past the trained length) is never reached.
"""

import math

import torch
from torch import Tensor

from baton.engine.rope_config import RopeConfig

_FAR = 1 << 17
"""Beyond, float32 no longer tells the angles of neighbours apart well enough."""


class RotaryEmbedding:
    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        self.inv_freq, self.scale = inverse_frequencies(config, head_dim)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(n, 1, head_dim) cosines and signed sines of the positions, see `ops.rope`."""
        angles = positions.to(torch.float32).unsqueeze(1) * self.inv_freq
        if len(positions) and int(positions.max()) > _FAR:
            exact = positions.to(torch.float64).unsqueeze(1) * self.inv_freq.to(torch.float64)
            angles = exact.remainder(2 * math.pi).to(torch.float32)
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        full_cos = torch.cat((cos, cos), dim=1).to(dtype)
        full_sin = torch.cat((-sin, sin), dim=1).to(dtype)
        return full_cos.unsqueeze(1), full_sin.unsqueeze(1)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Frequencies (head_dim / 2) in float32, and the factor on cosine and sine."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (config.theta**exponents)
    match config.kind:
        case "default" | "dynamic":
            return plain, 1.0
        case "linear":
            return plain / config.factor, 1.0
        case "llama3":
            return _llama3(config, plain), 1.0
        case "yarn":
            return _yarn(config, plain, head_dim), _yarn_scale(config)
    raise ValueError(f"RoPE scaling {config.kind!r} is not supported")


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    original, low, high = (
        config.original_max_position,
        config.low_freq_factor,
        config.high_freq_factor,
    )
    wavelength = 2 * math.pi / plain
    slowed = torch.where(wavelength > original / low, plain / config.factor, plain)
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * slowed / config.factor + blend * slowed
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, slowed)


def _yarn(config: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    def dimension(rotations: float) -> float:
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return plain / config.factor * ramp + plain * (1 - ramp)


def _yarn_scale(config: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return float(config.attention_factor)
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)
