"""Root-mean-square normalisation over the last dimension, computed in float32."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """`weight` is float32 and broadcasts against `x`; `eps` is a float32 scalar tensor. Fewer
    passes over memory than the composite that torch runs on a CPU, and one rounding at the end."""
    wide = x.to(torch.float32)
    norm = torch.linalg.vector_norm(wide, 2, -1, True)
    scale = torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    if wide is x:
        return (wide * scale).mul_(weight)
    return wide.mul_(scale).mul_(weight).to(x.dtype)
