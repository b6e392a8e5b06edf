"""Rotary position embedding of query and key heads."""

from torch import Tensor


def apply_rope_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates (n, head, head_dim) in place. `cos` and `sin` are (n, 1, head_dim); the first half
    of `sin` carries the minus sign of the rotation, so that both halves are one expression."""
    n, num_heads, head_dim = heads.shape
    swapped = heads.view(n, num_heads, 2, head_dim // 2).flip(2).view(n, num_heads, head_dim)
    heads.mul_(cos).addcmul_(swapped, sin)
