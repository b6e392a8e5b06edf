"""Attention sinks: the first tokens of a text, read as if they came right before the window.

What rotary attention sees of a key is its distance. Between the tokens of a window that never
changes, so their keys stay rotated as they were written. A sink is as far away as the cache is
long: a second query, the anchored one, stands where the cache ends and not where the text does,
and meets the sinks; one softmax runs over both parts. (StreamingLLM, arXiv 2309.17453, keeps
keys unrotated and rotates all of them at every step, with the same result.)
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.ops.rope import Rope


@dataclass(frozen=True)
class Anchors:
    """`positions` (n) of the batch's anchored queries. `ropes` are theirs, for layers that see
    everything and for those with a window; the model fills them in."""

    positions: Tensor
    ropes: tuple[Rope | None, Rope | None] | None = None


class SinkView(NamedTuple):
    """The anchored query, shaped as the other one, and the additive mask (…, query, sinks) of
    what it sees; the sinks come first in the context."""

    query: Tensor
    mask: Tensor


def attend_with_sinks(
    query: Tensor,
    sinks: SinkView,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """Softmax over the sinks and what `mask` leaves of the context, in float32."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    count = sinks.mask.shape[-1]
    near = _logits(query, keys, scale, softcap) + mask
    far = _logits(sinks.query, keys[..., :count, :], scale, softcap) + sinks.mask
    weights = torch.cat((far, near), dim=-1).softmax(dim=-1).to(values.dtype)
    out = torch.matmul(weights[..., count:], values)
    return out + torch.matmul(weights[..., :count], values[..., :count, :])


def _logits(query: Tensor, keys: Tensor, scale: float, softcap: float | None) -> Tensor:
    logits = torch.matmul(query.float(), keys.float().transpose(-1, -2))
    if softcap is None:
        return logits.mul_(scale)
    return logits.mul_(scale / softcap).tanh_().mul_(softcap)
