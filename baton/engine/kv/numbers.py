"""Numbers of 8 or 4 bits with a scale that some of them share.

`quantize` takes the scales over some dimensions; `quantize_around_mean`, for fp8, also takes off
the mean first. `dequantize` is exact arithmetic on what is stored. Scales are float16, rounded up,
so that nothing is clipped; a value comes back within half a scale (int8, int4) or within 1/16 of
itself or of its distance from the mean (fp8, e4m3).
"""

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

_F8 = torch.float8_e4m3fn
_F8_MAX = 448.0
_F16_MAX = 65504.0
_F8_TOP = 256.0
"""Where the largest value of a group comes to lie. Between it and e4m3's largest, 448, steps are
twice as wide, and numbers that lie close together would all take them."""
_STEPS = 14
"""Of int4: one fewer than 4 bits have, because its zero point is a whole number of steps."""
_FARTHEST = 120
"""Steps from zero that an int4 zero point reaches; a narrow range far away gets wider steps."""


class Quantized(NamedTuple):
    """`scale` (float16) has size 1 in the shared dimensions. `zero` is what the numbers count from:
    of int4 in steps (int8), of fp8 around its mean a value (float16), else None; size 1 likewise.
    `payload` (uint8) is as long as the values, or half in the last dimension."""

    payload: Tensor
    scale: Tensor
    zero: Tensor | None = None


def quantize(x: Tensor, kind: str, dim: int | tuple[int, ...]) -> Quantized:
    """`x` is float32; int4 shares over one dimension."""
    if kind == "int4":
        assert isinstance(dim, int)
        return _int4(x, dim)
    largest = x.abs().amax(dim=dim, keepdim=True)
    scale = _round_up(largest / (_F8_TOP if kind == "fp8" else 127.0))
    scaled = x / scale.float()
    if kind == "fp8":
        return Quantized(scaled.clamp_(-_F8_MAX, _F8_MAX).to(_F8).view(torch.uint8), scale)
    return Quantized(scaled.round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8), scale)


def quantize_around_mean(x: Tensor, dim: int, others: int) -> Quantized:
    """fp8 of `x` (float32) less its mean over `dim`; a scale is shared over `dim` and `others`."""
    # A sum in this order whatever else is computed with it; `Tensor.sum` would choose one.
    mean = reduce(torch.add, x.unbind(dim)).div_(x.shape[dim]).unsqueeze(dim)
    zero = mean.nan_to_num_(0.0).clamp_(-_F16_MAX, _F16_MAX).to(torch.float16)
    return quantize(x - zero.float(), "fp8", (dim, others))._replace(zero=zero)


def dequantize(q: Quantized, kind: str) -> Tensor:
    """float32."""
    if kind == "int4":
        assert q.zero is not None
        values = torch.cat((q.payload & 15, q.payload >> 4), dim=-1).float() - q.zero.float()
        return values.mul_(q.scale.float())
    values = q.payload.view(_F8 if kind == "fp8" else torch.int8).float().mul_(q.scale.float())
    return values if q.zero is None else values.add_(q.zero.float())


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
    return (scale * (1 + 2.0**-10) + 2.0**-24).clamp_(max=_F16_MAX).to(torch.float16)
