"""Attention over cached latents, from which keys and values of all heads can be unpacked.

A prompt unpacks them: its many queries share the work. A decode step does not: it moves the
unpacking of keys into the query and that of values behind the sum (the absorbed form), so it
reads the latents alone, as if they were one key-value head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.ops.attention import AttentionBatch, DecodeGroup, PrefillChunk, Rows, Window


@dataclass(frozen=True)
class Unpacking:
    """`keys` (head, nope_dim, rank) and `values` (head, value_dim, rank) of a latent; `scale`
    is the factor on the attention logits."""

    keys: Tensor
    values: Tensor
    scale: float


def latent_attention(
    q: Tensor,
    latents: Tensor,
    table: Tensor,
    batch: AttentionBatch,
    window: Window,
    unpacking: Unpacking,
) -> Tensor:
    """(n, head, value_dim) of queries (n, head, nope_dim + rope_dim). `latents` (n, rank +
    rope_dim) are the batch's own, already written to the cache whose layer is `table`."""
    outputs = []
    if batch.decodes is not None:
        outputs.append(
            _decode(q[: batch.decodes.num_seqs], table, batch.decodes, window, unpacking)
        )
    for chunk in batch.prefills:
        outputs.append(_prefill(q, latents, table, chunk, window, unpacking))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _context(table: Tensor, rows: Rows, width: int, num_seqs: int, length: int) -> Tensor:
    """Latents (sequence, length, width) of the blocks in `rows`."""
    picked = table.index_select(0, rows) if isinstance(rows, Tensor) else table[rows:]
    return picked.view(num_seqs, -1, width)[:, :length]


def _decode(
    q: Tensor, table: Tensor, group: DecodeGroup, window: Window, unpacking: Unpacking
) -> Tensor:
    nope, rank = unpacking.keys.shape[1:]
    rotated = q[..., nope:]
    absorbed = torch.einsum("bhd,hdr->bhr", q[..., :nope], unpacking.keys)
    query = torch.cat((absorbed, rotated), dim=-1).unsqueeze(1)
    width = rank + rotated.shape[-1]
    context = _context(table, group.rows, width, group.num_seqs, group.max_context).unsqueeze(1)
    mixed = F.scaled_dot_product_attention(
        query, context, context[..., :rank], attn_mask=group.masks[window], scale=unpacking.scale
    )
    return torch.einsum("bhr,hvr->bhv", mixed[:, 0], unpacking.values)


def _prefill(
    q: Tensor,
    latents: Tensor,
    table: Tensor,
    chunk: PrefillChunk,
    window: Window,
    unpacking: Unpacking,
) -> Tensor:
    rank = unpacking.keys.shape[2]
    if chunk.rows is None:
        context = latents[chunk.start : chunk.end]
    else:
        context = _context(table, chunk.rows, latents.shape[1], 1, chunk.context_len)[0]
    latent, rotated = context[:, :rank], context[:, rank:]
    keys = torch.matmul(latent, unpacking.keys.transpose(1, 2))  # (head, context, nope_dim)
    keys = torch.cat((keys, rotated.expand(len(keys), -1, -1)), dim=-1)
    values = torch.matmul(latent, unpacking.values.transpose(1, 2))
    mask = chunk.masks[window]
    out = F.scaled_dot_product_attention(
        q[chunk.start : chunk.end].transpose(0, 1).unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None and chunk.end - chunk.start > 1,
        scale=unpacking.scale,
    )
    return out[0].transpose(0, 1)
