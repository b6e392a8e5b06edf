"""The norms of the residual stream; both compute in float32 and round once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.ops.norm import rms_norm


class RMSNorm:
    """`weight` is float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The result has `dtype` (default: that of `x`)."""
        return rms_norm(x, self.weight, self.eps, dtype)


class LayerNorm:
    """`weight` and `bias` are float32."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The result has `dtype` (default: that of `x`)."""
        normed = F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps)
        return normed.to(dtype or x.dtype)


Norm = RMSNorm | LayerNorm
