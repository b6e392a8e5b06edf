"""Rotary position embedding of query and key heads."""

import torch
from torch import Tensor


def apply_rope_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates (n, head, head_dim) in place. `cos` and `sin` are (n, 1, head_dim); the first half
    of `sin` carries the minus sign of the rotation, so that both halves are one expression."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    heads.mul_(cos).addcmul_(swapped, sin)
