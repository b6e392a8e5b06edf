"""As `ops.quantized_attention`, by kernels that read quantized blocks where they are.

Blocks that the batch fills are quantized first, because its later queries see them so. The kernel
then reads blocks, tails and the batch's own tokens, and puts what fills no block into the tails.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.ops.attention import PagedBatch, Window
from baton.engine.ops.cpu.kernels import kernels
from baton.engine.ops.quantized_attention import TailStore


@dataclass(frozen=True)
class QuantizedPlaces:
    """`tails` (sequence, row), int32, hold the newest tokens of each sequence. The batch fills the
    blocks `filled_rows`: their tokens are `filled_from`, counted over the tokens of the tails
    `filling` (one row per sequence that fills any) and then over those of the batch."""

    store: TailStore
    tails: Tensor
    filling: Tensor
    filled_rows: Tensor
    filled_from: Tensor


def quantized_in_place(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    batch: PagedBatch,
    window: Window,
    scale: float | None = None,
    anchored: Tensor | None = None,
) -> Tensor:
    """As `quantized_attention`; `q` and `kv` may be slices of wider rows."""
    loaded, places = kernels(), batch.quantized
    assert loaded is not None, "PagedBatch is for models that `reads_in_place`"
    assert places is not None
    if len(places.filled_rows):
        _fill_blocks(kv, table, places)
    return loaded.quantized_attention(
        q,
        kv,
        table,
        places.store.codec.sizes,
        batch.tables,
        places.tails,
        batch.starts,
        batch.lengths,
        window,
        q.shape[-1] ** -0.5 if scale is None else scale,
        batch.streams.get(window),
        anchored,
    )


def _fill_blocks(kv: Tensor, table: Tensor, places: QuantizedPlaces) -> None:
    codec = places.store.codec
    _, tails = places.store.read(table, places.filling)
    tokens = torch.cat((tails.flatten(0, 1), kv)).index_select(0, places.filled_from)
    blocks = tokens.view(-1, codec.sizes.block_size, *kv.shape[1:])
    table.index_copy_(0, places.filled_rows, codec.encode(blocks))
