"""Rotary position embedding of query and key heads."""

import torch
from torch import Tensor

from baton.engine.ops.cpu.kernels import kernels

Rope = tuple[Tensor, Tensor]
"""Cosines and signed sines of the batch's positions, each (n, 1, rotary_dim)."""


def apply_rope_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates (n, head, head_dim) in place. `cos` and `sin` are (n, 1, head_dim); the first half
    of `sin` carries the minus sign of the rotation, so that both halves are one expression."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    heads.mul_(cos).addcmul_(swapped, sin)


def rotate_and_store(
    qkv: Tensor,
    rope: Rope,
    norm: Tensor | None,
    eps: float,
    slots: Tensor | None,
    slot_mapping: Tensor,
    num_heads: int,
) -> None:
    """Only for models whose attention reads in place: one pass over qkv (n, head + 2 * kv_head,
    head_dim) rotates the queries where they are, and puts rotated keys and the values into the
    layer's slots; without `slots` keys are rotated where they are, too. `rope` is float32; `norm`
    (head + kv_head, head_dim) or None scales normed heads first."""
    loaded = kernels()
    assert loaded is not None
    loaded.rotate_and_store(qkv, rope, norm, eps, slots, slot_mapping, num_heads)
