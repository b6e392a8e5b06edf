"""Keys and values of one sequence in one layer, read and written whole in a cache of any kind.

A place is where they lie: blocks, and, in a quantized cache, the tail with what fills no block.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.kv.codec import BlockCodec
from baton.engine.kv_layout import KVLayout
from baton.engine.ops.quantized_attention import TailStore
from baton.engine.sequence import Sequence


class Place(NamedTuple):
    blocks: list[int]
    tail: list[int]

    @staticmethod
    def of(seq: Sequence) -> "Place":
        return Place(seq.block_table, seq.tail_blocks)

    @staticmethod
    def of_compact(seq: Sequence) -> "Place":
        return Place(seq.compact_blocks, seq.tail_blocks)


@dataclass(frozen=True)
class KVStore:
    """`tails` is None for a cache of plain values. `cache` of the methods is a layer's (slots,
    table); see `KVCache`."""

    layout: KVLayout
    tails: TailStore | None = None

    @staticmethod
    def of(layout: KVLayout, dtype: torch.dtype) -> "KVStore":
        if layout.quantized is None:
            return KVStore(layout)
        return KVStore(layout, TailStore(BlockCodec(layout.quantized), dtype))

    def read(self, cache: tuple[Tensor, Tensor], place: Place, count: int) -> Tensor:
        """(count, key|value, kv_head, head_dim), a copy."""
        if self.tails is None:
            return cache[0][:, self.slots(place.blocks, count)].transpose(0, 1)
        full, rest = divmod(count, self.layout.block_size)
        rows = torch.tensor(place.blocks[:full], dtype=torch.long)
        kv = self.tails.codec.decode(cache[1].index_select(0, rows)).flatten(0, 1)
        _, tail = self.tails.read(cache[1], torch.tensor([place.tail]))
        return torch.cat((kv, tail[0, :rest].float()))

    def write(self, cache: tuple[Tensor, Tensor], place: Place, kv: Tensor) -> None:
        count = len(kv)
        if self.tails is None:
            cache[0].index_copy_(1, self.slots(place.blocks, count), kv.transpose(0, 1))
            return
        size = self.layout.block_size
        full = count // size
        if full:
            rows = torch.tensor(place.blocks[:full])
            groups = kv[: full * size].view(full, size, *kv.shape[1:])
            cache[1].index_copy_(0, rows, self.tails.codec.encode(groups))
        picked, tail = self.tails.read(cache[1], torch.tensor([place.tail]))
        tail[0, : count - full * size] = kv[full * size :].to(tail.dtype)
        self.tails.write(cache[1], torch.tensor([place.tail]), picked)

    def slots(self, blocks: list[int], count: int) -> Tensor:
        """Of the first `count` tokens, in a layer's slots."""
        size = self.layout.block_size
        return (torch.tensor(blocks).unsqueeze(1) * size + torch.arange(size)).flatten()[:count]
