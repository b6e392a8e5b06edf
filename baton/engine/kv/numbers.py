"""Numbers of 8 or 4 bits with a scale that some of them share.

`quantize` takes the scales over one dimension; `dequantize` is exact arithmetic on what is
stored. Scales are float16, rounded up so that nothing is clipped; a value comes back within half
a scale (int8, int4) or within 1/16 of itself (fp8, e4m3).
"""

from typing import NamedTuple

import torch
from torch import Tensor

_F8 = torch.float8_e4m3fn
_F8_MAX = 448.0
_F8_TOP = 256.0
"""Where the largest value of a group comes to lie. Between it and e4m3's largest, 448, steps are
twice as wide, and numbers that lie close together, as a key's channel does, would all take them."""
_STEPS = 14
"""Of int4: one fewer than 4 bits have, because its zero point is a whole number of steps."""
_FARTHEST = 120
"""Steps from zero that an int4 zero point reaches; a narrow range far away gets wider steps."""


class Quantized(NamedTuple):
    """`scale` (float16) and `zero` (int8; None but for int4) have size 1 in the shared
    dimension; `payload` (uint8) is as long as the values, or half in the last dimension."""

    payload: Tensor
    scale: Tensor
    zero: Tensor | None = None


def quantize(x: Tensor, kind: str, dim: int) -> Quantized:
    """`x` is float32."""
    if kind == "int4":
        return _int4(x, dim)
    largest = x.abs().amax(dim=dim, keepdim=True)
    scale = _round_up(largest / (_F8_TOP if kind == "fp8" else 127.0))
    scaled = x / scale.float()
    if kind == "fp8":
        return Quantized(scaled.clamp_(-_F8_MAX, _F8_MAX).to(_F8).view(torch.uint8), scale)
    return Quantized(scaled.round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8), scale)


def dequantize(q: Quantized, kind: str) -> Tensor:
    """float32."""
    if kind == "int4":
        assert q.zero is not None
        values = torch.cat((q.payload & 15, q.payload >> 4), dim=-1).float() - q.zero.float()
    else:
        values = q.payload.view(_F8 if kind == "fp8" else torch.int8).float()
    return values.mul_(q.scale.float())


def _int4(x: Tensor, dim: int) -> Quantized:
    low, high = x.amin(dim=dim, keepdim=True), x.amax(dim=dim, keepdim=True)
    farthest = torch.maximum(low.abs(), high.abs())
    scale = _round_up(torch.maximum((high - low) / _STEPS, farthest / _FARTHEST))
    wide = scale.float()
    zero = (-low / wide).round_()
    steps = (x / wide).round_().add_(zero).clamp_(0, 15).to(torch.uint8)
    first, second = steps.chunk(2, dim=-1)
    return Quantized(first | (second << 4), scale, zero.to(torch.int8))


def _round_up(scale: Tensor) -> Tensor:
    """float16, not below; never zero."""
    return (scale * (1 + 2.0**-10) + 2.0**-24).clamp_(max=65504.0).to(torch.float16)
