"""Kernels that read quantized blocks where they are, against the codec and the definition: a query
sees its own block exact and earlier ones as the codec gives them back. And bit for bit the same
whichever way the tokens come."""

from itertools import accumulate

import pytest
import torch

from baton.engine.kv.codec import BlockCodec
from baton.engine.kv.quantized_sizes import KINDS, QuantizedSizes
from baton.engine.ops.attention import PagedBatch
from baton.engine.ops.cpu.kernels import Streams, kernels
from baton.engine.ops.quantized_attention import TailStore
from baton.engine.ops.quantized_in_place import QuantizedPlaces, quantized_in_place

pytestmark = pytest.mark.skipif(kernels() is None, reason="no kernels for this CPU")

HEADS, KV_HEADS = 6, 2


class Text:
    """One sequence's tokens: queries and keys and values, (token, head, head_dim) each, as slices
    of the wider rows that a product makes."""

    def __init__(self, dtype: torch.dtype, length: int, dim: int) -> None:
        self.rows = torch.randn(length, HEADS + 2 * KV_HEADS, dim).to(dtype)
        self.anchored = torch.randn(length, HEADS, dim).to(dtype)
        self.blocks: list[int] = []
        self.tails: list[int] = []
        self.computed = 0


class Layer:
    def __init__(self, kind: str, dtype: torch.dtype, block_size: int, dim: int) -> None:
        sizes = QuantizedSizes(kind, block_size, KV_HEADS, dim)
        self.size, self.dim = block_size, dim
        self.store = TailStore(BlockCodec(sizes), dtype)
        # Whatever was in a block before must not matter.
        self.table = torch.randint(0, 256, (120, sizes.row_bytes), dtype=torch.uint8)
        self.free = torch.randperm(120).tolist()
        tail = block_size * 2 * KV_HEADS * dim * dtype.itemsize
        self.num_tails = -(-tail // sizes.row_bytes)

    def step(
        self, *work: tuple[Text, int], window: int | None = None, sinks: int = 0
    ) -> list[torch.Tensor]:
        """What the next `count` tokens of each text see."""
        filling, rows, filled = [], [], []
        batch_rows, anchored, lengths = [], [], []
        for text, count in work:
            while len(text.tails) < self.num_tails:
                text.tails.append(self.free.pop())
            first, end = text.computed, text.computed + count
            before, full = first // self.size, end // self.size
            text.blocks += [self.free.pop() for _ in range(full - len(text.blocks))]
            if full > before:
                filling.append(text.tails)
                rows += text.blocks[before:full]
                filled.append(
                    (sum(map(len, batch_rows)), first % self.size, full * self.size - first)
                )
            batch_rows.append(text.rows[first:end])
            anchored.append(text.anchored[first:end])
            lengths.append(end)
            text.computed = end
        own, tokens = len(filling) * self.size, []
        for index, (start, in_tail, fresh) in enumerate(filled):
            tokens += range(index * self.size, index * self.size + in_tail)
            tokens += range(own + start, own + start + fresh)
        counts = [count for _, count in work]
        width = max(1, *(len(text.blocks) for text, _ in work))
        tables = [text.blocks + [0] * (width - len(text.blocks)) for text, _ in work]
        streams = torch.full((len(work),), window or 0).int(), torch.full((len(work),), sinks).int()
        batch = PagedBatch(
            torch.empty(0),
            torch.tensor(tables).int(),
            torch.tensor([0, *accumulate(counts)]).int(),
            torch.tensor(lengths).int(),
            self.size,
            {None: Streams(*streams)} if sinks else {},
            QuantizedPlaces(
                self.store,
                torch.tensor([text.tails for text, _ in work]).int(),
                torch.tensor(filling, dtype=torch.long),
                torch.tensor(rows, dtype=torch.long),
                torch.tensor(tokens, dtype=torch.long),
            ),
        )
        qkv = torch.cat(batch_rows)
        kv = qkv[:, HEADS:].view(len(qkv), 2, KV_HEADS, self.dim)
        out = quantized_in_place(
            qkv[:, :HEADS],
            kv,
            self.table,
            batch,
            None if sinks else window,
            anchored=torch.cat(anchored) if sinks else None,
        )
        return list(out.split(counts))

    def run(
        self, text: Text, *chunks: int, window: int | None = None, sinks: int = 0
    ) -> torch.Tensor:
        return torch.cat([self.step((text, n), window=window, sinks=sinks)[0] for n in chunks])

    def expected(self, text: Text, position: int, window: int | None, sinks: int) -> torch.Tensor:
        exact = text.rows[: position + 1, HEADS:].view(-1, 2, KV_HEADS, self.dim)
        full, places = position // self.size * self.size, torch.arange(position + 1)
        blocks = exact[:full].view(-1, self.size, 2, KV_HEADS, self.dim)
        codec = self.store.codec
        seen = torch.cat((codec.decode(codec.encode(blocks)).flatten(0, 1), exact[full:].float()))
        keys, values = seen.repeat_interleave(HEADS // KV_HEADS, 2).unbind(1)
        near = torch.einsum("hd,thd->ht", text.rows[position, :HEADS].float(), keys)
        far = torch.einsum("hd,thd->ht", text.anchored[position].float(), keys)
        logits = torch.where(places < sinks, far, near) * self.dim**-0.5
        visible = (places < sinks) | (places > position - (window or position + 1))
        return torch.einsum("ht,thd->hd", logits.masked_fill(~visible, -1e9).softmax(-1), values)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (19, 0), (19, 5), (40, 33)])
@pytest.mark.parametrize(("block_size", "dim"), [(16, 64), (4, 16), (7, 80), (40, 10), (16, 256)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_query_sees_its_block_exact_and_earlier_ones_as_the_codec_gives_them_back(
    kind: str, dtype: torch.dtype, block_size: int, dim: int, window: int | None, sinks: int
) -> None:
    layer, text = Layer(kind, dtype, block_size, dim), Text(dtype, 100, dim)
    ours = layer.run(text, 37, 1, 1, 50, 11, window=window, sinks=sinks)
    for position in (0, 3, 15, 16, 31, 36, 37, 38, 39, 64, 88, 99):
        expected = layer.expected(text, position, window, sinks)
        close = 2e-5 if dtype is torch.float32 else 8e-3
        torch.testing.assert_close(ours[position].float(), expected, rtol=close, atol=close)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_same_bit_for_bit_however_they_come(
    kind: str, dtype: torch.dtype, threads: int
) -> None:
    """In one prompt, in chunks, one by one, and among others; blocks and tails then, too."""
    before, length = torch.get_num_threads(), 90
    layers = [Layer(kind, dtype, 16, 64) for _ in range(4)]
    texts = [Text(dtype, length, 64) for _ in layers]
    for text in texts[1:]:
        text.rows = texts[0].rows
    wanted = layers[0].run(texts[0], length)
    try:
        torch.set_num_threads(threads)
        found = [
            layers[1].run(texts[1], 5, 11, 1, 40, 33),
            layers[2].run(texts[2], *[1] * length),
        ]
        other, parts = Text(dtype, 300, 64), []
        for mine, theirs in ((30, 1), (1, 100), (3, 31), (56, 7)):
            parts.append(layers[3].step((other, theirs), (texts[3], mine))[1])
        found.append(torch.cat(parts))
    finally:
        torch.set_num_threads(before)
    for layer, text, ours in zip(layers[1:], texts[1:], found, strict=True):
        assert torch.equal(ours, wanted)
        for mine, theirs in zip(text.blocks, texts[0].blocks, strict=True):
            assert torch.equal(layer.table[mine], layers[0].table[theirs])
        tails = [
            x.store.read(x.table, torch.tensor([t.tails]))[1][0, : length % 16]
            for x, t in ((layer, text), (layers[0], texts[0]))
        ]
        assert torch.equal(*tails)
        assert torch.equal(tails[0], text.rows[80:, HEADS:].view(10, 2, KV_HEADS, 64))


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_unpacked_as_the_codec_does(kind: str) -> None:
    """One query that sees one key, so that its values come out."""
    layer, text = Layer(kind, torch.float32, 1, 256), Text(torch.float32, 2, 256)
    layer.run(text, 1)
    row = layer.table[text.blocks[0]]
    *_, count = layer.store.codec.sizes.parts
    start = sum(layer.store.codec.sizes.parts) - count
    for shift in range(0, 256, 64):
        # All but the two of fp8 that are no numbers.
        row[start : start + count] = (torch.arange(count) + shift) % 127 + shift // 128 * 128
        layer.free += [text.blocks.pop() for _ in text.blocks[1:]]
        text.computed = 1
        text.rows[1, HEADS : HEADS + KV_HEADS] = -1e4 * text.rows[1, 0]
        text.rows[1, :HEADS] = text.rows[1, 0]
        (ours,) = layer.step((text, 1))
        values = layer.store.codec.decode(row.unsqueeze(0))[0, 0, 1]
        assert torch.equal(ours[0], values.repeat_interleave(HEADS // KV_HEADS, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_quantized_to_the_same_bytes_among_any_others(kind: str) -> None:
    """Also where vectors of torch end and single numbers begin."""
    for sizes in (QuantizedSizes(kind, 16, 3, 64), QuantizedSizes(kind, 5, 1, 18)):
        codec = BlockCodec(sizes)
        blocks = torch.randn(23, sizes.block_size, 2, sizes.num_kv_heads, sizes.head_dim)
        together = codec.encode(blocks)
        for at, count in ((0, 1), (22, 1), (3, 2), (5, 17)):
            assert torch.equal(codec.encode(blocks[at : at + count]), together[at : at + count])
