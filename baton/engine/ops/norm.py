"""Root-mean-square normalisation over the last dimension, computed in float32."""

import torch
from torch import Tensor

from baton.engine.ops.cpu.kernels import kernels, takes


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """`weight` is float32 and broadcasts against `x`; the result has `dtype` (default: that of
    `x`). Fewer passes over memory than the composite that torch runs on a CPU, and one rounding
    at the end."""
    dtype = dtype or x.dtype
    loaded = kernels() if takes(dtype) and x.dtype is torch.float32 else None
    if loaded is not None and x.dim() == 2 and weight.dim() == 1 and x.device.type == "cpu":
        return loaded.rms_norm(x, weight, eps, dtype)
    wide = x.to(torch.float32)
    norm = torch.linalg.vector_norm(wide, 2, -1, True)
    scale = norm.mul_(norm).mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    if wide is x:
        return (wide * scale).mul_(weight).to(dtype)
    return wide.mul_(scale).mul_(weight).to(dtype)
