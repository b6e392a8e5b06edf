"""Root-mean-square normalisation over the last dimension, computed in float32."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`weight` is float32 and broadcasts against `x`; `eps` is a float32 scalar tensor; the
    result has `dtype` (default: that of `x`). Fewer passes over memory than the composite that
    torch runs on a CPU, and one rounding at the end."""
    dtype = dtype or x.dtype
    wide = x.to(torch.float32)
    norm = torch.linalg.vector_norm(wide, 2, -1, True)
    scale = torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    if wide is x:
        return (wide * scale).mul_(weight).to(dtype)
    return wide.mul_(scale).mul_(weight).to(dtype)
