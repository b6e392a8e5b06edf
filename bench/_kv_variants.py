"""What the policies are compared with: keys scaled per token, and tokens evicted at random."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from baton.engine.kv.codec import BlockCodec
from baton.engine.kv.numbers import Quantized, dequantize, quantize
from baton.engine.models.decoder import DecoderModel


class TokenScales(BlockCodec):
    """Keys too have a scale per token. Their values are quantized and decoded at once, and kept as
    float16 keys of a dictionary beside the cache: only what is read matters here."""

    kept: dict[bytes, Tensor] = {}  # noqa: RUF012

    def encode(self, kv: Tensor) -> Tensor:
        rows = super().encode(kv)
        flat = quantize(kv[:, :, 0].float(), self.sizes.kind, 3)
        keys = dequantize(Quantized(*flat), self.sizes.kind)
        for row, block in zip(rows, keys, strict=True):
            self.kept[row.numpy().tobytes()] = block.half()
        return rows

    def decode(self, rows: Tensor) -> Tensor:
        kv = super().decode(rows)
        for row, block in zip(rows, kv, strict=True):
            keys = self.kept.get(row.numpy().tobytes())
            if keys is not None:
                block[:, 0] = keys.float()
        return kv


@contextlib.contextmanager
def keys_scaled_per_token(model: DecoderModel) -> Iterator[None]:
    TokenScales.kept.clear()
    with (
        mock.patch("baton.engine.quantized_tables.BlockCodec", TokenScales),
        mock.patch("baton.engine.kv_stores.BlockCodec", TokenScales),
        # A kernel would read the bytes themselves.
        mock.patch.object(model, "reads_in_place", False),
    ):
        yield
    TokenScales.kept.clear()


@contextlib.contextmanager
def evicted_at_random() -> Iterator[None]:
    """The newest tokens stay, the others are drawn: `keep` without its scores."""
    generator = torch.Generator().manual_seed(0)

    def keep(scores: Tensor, count: int, newest: int, kernel: int = 1) -> Tensor:
        num_tokens = scores.shape[1]
        drawn = [
            torch.randperm(num_tokens - newest, generator=generator)[: count - newest].sort().values
            for _ in scores
        ]
        last = torch.arange(num_tokens - newest, num_tokens).expand(len(scores), -1)
        return torch.cat((torch.stack(drawn), last), dim=1)

    with mock.patch("baton.engine.retention.keep", keep):
        yield
