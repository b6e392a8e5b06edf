"""What evicting policies compute beside attention: how much each cached token has received of it.

All in float32. Heads that share a key-value head are summed, so each key-value head keeps tokens of
its own; they fill the same slots, in the order of the text.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_QUERIES = 64
"""Of one product: their logits over a whole prompt are in memory at once."""


def received(
    q: Tensor, keys: Tensor, first: int, scale: float | None, softcap: float | None
) -> Tensor:
    """(kv_head, token) attention that the keys (token, kv_head, head_dim) receive in all from the
    queries (n, head, head_dim) at the places `first` and on."""
    num_tokens, num_kv_heads, head_dim = keys.shape
    total = torch.zeros(num_kv_heads, num_tokens)
    by_head = keys.float().permute(1, 2, 0).unsqueeze(1)
    places = torch.arange(num_tokens)
    for start in range(0, len(q), _QUERIES):
        part = q[start : start + _QUERIES].float()
        query = part.view(len(part), num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        own = first + start + torch.arange(len(part))
        logits = _bend(query @ by_head, head_dim, scale, softcap)
        logits.masked_fill_(places > own.unsqueeze(1), float("-inf"))
        total += logits.softmax(dim=-1).sum(dim=(1, 2))
    return total


def received_in_step(
    q: Tensor, keys: Tensor, lengths: Tensor, scale: float | None, softcap: float | None
) -> Tensor:
    """(sequence, kv_head, slot) of one query (sequence, head, head_dim) each, over keys
    (sequence, slot, kv_head, head_dim) of which the first `lengths` are there."""
    num_seqs, num_slots, num_kv_heads, head_dim = keys.shape
    query = q.float().view(num_seqs, num_kv_heads, -1, head_dim)
    logits = _bend(query @ keys.float().permute(0, 2, 3, 1), head_dim, scale, softcap)
    absent = torch.arange(num_slots) >= lengths.unsqueeze(1)
    logits.masked_fill_(absent[:, None, None], float("-inf"))
    return logits.softmax(dim=-1).sum(dim=2)


def keep(scores: Tensor, count: int, newest: int, kernel: int = 1) -> Tensor:
    """(kv_head, count) places, ascending: the `newest` last ones, and of the others those with the
    highest scores (kv_head, token), each the highest of its `kernel` neighbours."""
    num_tokens = scores.shape[1]
    older = scores[:, : num_tokens - newest]
    if kernel > 1:
        older = F.max_pool1d(older.unsqueeze(0), kernel, stride=1, padding=kernel // 2)[0]
    # Stable: neighbours that share a score are taken from the first on.
    order = older.sort(dim=1, descending=True, stable=True).indices[:, : count - newest]
    last = torch.arange(num_tokens - newest, num_tokens).expand(len(scores), -1)
    return torch.cat((order.sort(dim=1).values, last), dim=1)


def pick(kv: Tensor, places: Tensor) -> Tensor:
    """(count, key|value, kv_head, head_dim) of kv (token, …), each head at its own places."""
    index = places.T[:, None, :, None].expand(-1, kv.shape[1], -1, kv.shape[3])
    return kv.gather(0, index)


def _bend(logits: Tensor, head_dim: int, scale: float | None, softcap: float | None) -> Tensor:
    scale = head_dim**-0.5 if scale is None else scale
    if softcap is None:
        return logits.mul_(scale)
    return logits.mul_(scale / softcap).tanh_().mul_(softcap)
