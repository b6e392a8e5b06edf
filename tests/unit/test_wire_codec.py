"""Hand-offs that are smaller than the cache, or end in a cache of another dtype."""

import dataclasses

import pytest
import torch

from baton.engine.kv.codec import BlockCodec
from baton.engine.kv.quantized_sizes import QuantizedSizes
from baton.engine.kv_cache import DTYPES, KVCache
from baton.engine.kv_layout import KVLayout, converts
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import Sequence
from baton.engine.transfer.base import HandoffDamaged, HandoffRefused, SharedBlocks
from baton.engine.transfer.landing import Landing
from baton.engine.transfer.payload import SequenceReader
from baton.engine.transfer.plan import RAW, FramePlan
from baton.engine.transfer.wire import codecs_of
from baton.kv_policy import parse_policy
from baton.worker.translate import handoff_block_size, layout_to_pb

BLOCK, LAYERS, HEADS, DIM = 8, 3, 2, 16
TOKENS = 2 * BLOCK + 3
EVERYTHING = FramePlan(0, LAYERS, (0, 1, 2))
WORST = {"int8": 1 / 127, "fp8": 1 / 16, "int4": 1 / 14}
"""Largest error, as a share of the largest value that shares a scale (int4: of twice that)."""


def layout(dtype: str = "bfloat16", block_size: int = BLOCK, kind: str = "full") -> KVLayout:
    heads = 1 if kind == "latent" else HEADS
    return KVLayout("f", LAYERS, heads, DIM, block_size, dtype, (kind,) * LAYERS)


def noise(shape: KVLayout, num_blocks: int = 10) -> KVCache:
    cache = KVCache(shape, num_blocks)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(1)))
    return cache


def holding(cache: KVCache, blocks: list[int], tokens: int = TOKENS) -> Sequence:
    """A sequence whose last blocks are its tail, if the cache is quantized."""
    seq = Sequence([1] * tokens, SamplingParams())
    count = -(-tokens // cache.layout.block_size)
    seq.block_table, seq.tail_blocks = blocks[:count], blocks[count:]
    return seq


def send(cache: KVCache, seq: Sequence, plan: FramePlan, block_size: int = BLOCK) -> tuple:
    ratio = cache.layout.block_size // block_size
    reader = SequenceReader(cache.in_blocks_of(block_size), seq, True, ratio)
    payload = torch.empty(reader.num_bytes(plan), dtype=torch.uint8)
    checksum = reader.read(plan, payload)
    return payload, checksum


def values(cache: KVCache, seq: Sequence, tokens: int = TOKENS) -> torch.Tensor:
    """(layer, token, key|value, head, dim) in float32, of a cache of any kind."""
    size, full = cache.layout.block_size, tokens // cache.layout.block_size
    quantized = cache.layout.quantized
    if quantized is None:
        places = [seq.block_table[t // size] * size + t % size for t in range(tokens)]
        return torch.stack([layer[:, places].transpose(0, 1) for layer in cache.slots]).float()
    rows = cache.data[:, 0]
    kept = rows[:, seq.block_table[:full]]
    decoded = BlockCodec(quantized).decode(kept.flatten(0, 1))
    decoded = decoded.view(LAYERS, full * size, 2, HEADS, DIM)
    dtype = DTYPES[cache.layout.compute_dtype]
    tail = rows[:, seq.tail_blocks].flatten(1)[:, : size * 2 * HEADS * DIM * dtype.itemsize]
    tail = tail.contiguous().view(dtype).view(LAYERS, size, 2, HEADS, DIM)
    return torch.cat((decoded, tail[:, : tokens - full * size].float()), dim=1)


def through(kind: str, kv: torch.Tensor) -> torch.Tensor:
    """The definition: full blocks through the codec of a quantized cache, the rest untouched."""
    codec = BlockCodec(QuantizedSizes(kind, BLOCK, HEADS, DIM))
    full = TOKENS // BLOCK * BLOCK
    blocks = kv[:, :full].reshape(-1, BLOCK, 2, HEADS, DIM)
    done = codec.decode(codec.encode(blocks)).view(LAYERS, full, 2, HEADS, DIM)
    return torch.cat((done, kv[:, full:]), dim=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_full_blocks_arrive_as_the_codec_makes_them_and_the_newest_tokens_exact(
    kind: str, dtype: str
) -> None:
    source, target = noise(layout(dtype)), KVCache(layout(dtype), 10)
    sent, here = holding(source, [5, 6, 7]), holding(target, [9, 0, 3])
    plan = dataclasses.replace(EVERYTHING, codec=kind)
    Landing(target, source.layout, here).write(plan, *send(source, sent, plan))
    before, after = values(source, sent), values(target, here)
    assert torch.equal(after, through(kind, before).to(DTYPES[dtype]).float())
    error = (after - before).abs()
    assert not error[:, 2 * BLOCK :].any()
    assert 0 < error.max() <= WORST[kind] * before.abs().max()
    untouched = [b for b in range(10) if b not in (9, 0, 3)]
    assert not target.data[:, :, untouched].any()


@pytest.mark.parametrize(("kind", "most"), [("fp8", 0.54), ("int8", 0.54), ("int4", 0.32)])
def test_a_payload_is_as_small_as_its_codec_says_before_it_is_made(kind: str, most: float) -> None:
    shape = KVLayout("f", LAYERS, 3, 64, 16, "bfloat16", ("full",) * LAYERS)
    source = noise(shape)
    seq = holding(source, [1, 2, 3, 4], 64)
    sizes = {}
    for codec in (RAW, kind):
        plan = FramePlan(1, 2, (0, 1, 2, 3), codec)
        payload, _ = send(source, seq, plan, 16)
        sizes[codec] = len(payload)
    assert sizes[kind] <= most * sizes[RAW]


@pytest.mark.parametrize("byte", [0, 777, -1])
def test_a_flipped_bit_in_encoded_bytes_is_noticed_before_anything_is_written(byte: int) -> None:
    source, target = noise(layout()), KVCache(layout(), 10)
    plan = dataclasses.replace(EVERYTHING, codec="int8")
    payload, checksum = send(source, holding(source, [5, 6, 7]), plan)
    payload[byte] ^= 1
    landing = Landing(target, source.layout, holding(target, [1, 2, 3]))
    with pytest.raises(HandoffDamaged, match="checksum"):
        landing.write(plan, payload, checksum)
    for size in (0, len(payload) - 1, len(payload) + 1):
        with pytest.raises(HandoffDamaged, match=f"came as {size} bytes"):
            landing.write(plan, torch.zeros(size, dtype=torch.uint8), None)
    assert not target.data.any()


def test_parts_of_a_hand_off_come_in_any_frames() -> None:
    """One block and one layer at a time, encoded and as they are, the last block alone too."""
    source, target = noise(layout("float32")), KVCache(layout("float32"), 10)
    sent, here = holding(source, [5, 6, 7]), holding(target, [9, 0, 3])
    landing = Landing(target, source.layout, here)
    for layer in range(LAYERS):
        for position in range(3):
            plan = FramePlan(layer, 1, (position,), ("int8", RAW)[layer % 2])
            landing.write(plan, *send(source, sent, plan))
    wanted = through("int8", values(source, sent))
    wanted[1] = values(source, sent)[1]
    assert torch.equal(values(target, here), wanted)


PAIRS = [
    ("bfloat16", "float32"),
    ("float32", "bfloat16"),
    ("bfloat16", "int8/bfloat16"),
    ("float32", "int4/float32"),
    ("bfloat16", "fp8/float32"),
]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_plain_values_are_converted_to_what_the_other_cache_holds(
    ours: str, theirs: str, shared: bool
) -> None:
    source, target = noise(layout(ours)), KVCache(layout(theirs), 16)
    tail = list(range(8, 8 + target.layout.num_tail_blocks))
    sent, here = holding(source, [5, 6, 7]), holding(target, [2, 0, 3, *tail])
    landing = Landing(target, source.layout, here)
    payload, checksum = send(source, sent, EVERYTHING)
    if shared:
        memory = source.data.flatten().view(torch.uint8).numpy()
        payload = SharedBlocks(memory, source.num_blocks, (5, 6, 7))
    landing.write(EVERYTHING, payload, checksum)
    kind = theirs.rpartition("/")[0]
    before = values(source, sent)
    wanted = through(kind, before) if kind else before.to(DTYPES[theirs]).float()
    assert landing.converts and torch.equal(values(target, here), wanted)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_blocks_encoded_as_the_other_cache_keeps_them_stay_as_they_are(kind: str) -> None:
    """So an int8 hand-off to an int8 cache is rounded once."""
    source, target = noise(layout("float32")), KVCache(layout("int8/float32"), 16)
    tail = list(range(8, 8 + target.layout.num_tail_blocks))
    sent, here = holding(source, [5, 6, 7]), holding(target, [2, 0, 3, *tail])
    plan = dataclasses.replace(EVERYTHING, codec=kind)
    Landing(target, source.layout, here).write(plan, *send(source, sent, plan))
    once = through("int8", values(source, sent))
    wanted = once if kind == "int8" else through("int8", through("fp8", values(source, sent)))
    assert torch.equal(values(target, here), wanted)


def test_larger_plain_blocks_are_cut_for_a_quantized_cache() -> None:
    source, target = noise(layout("float32", 2 * BLOCK)), KVCache(layout("int8/float32"), 16)
    size = handoff_block_size(source.layout, layout_to_pb(target.layout))
    assert size == BLOCK
    tail = list(range(8, 8 + target.layout.num_tail_blocks))
    sent, here = holding(source, [5, 6]), holding(target, [2, 0, 3, *tail])
    shape = source.in_blocks_of(size).layout
    Landing(target, shape, here).write(EVERYTHING, *send(source, sent, EVERYTHING))
    assert torch.equal(values(target, here), through("int8", values(source, sent)))
    with pytest.raises(HandoffRefused, match="block_size is 4 at prefill and 8 at decode"):
        handoff_block_size(layout("float32", 4), layout_to_pb(target.layout))


def test_latents_are_converted_between_plain_dtypes_and_never_encoded() -> None:
    source = noise(layout("bfloat16", kind="latent"))
    target = KVCache(layout("float32", kind="latent"), 10)
    sent, here = holding(source, [5, 6, 7]), holding(target, [9, 0, 3])
    landing = Landing(target, source.layout, here)
    landing.write(EVERYTHING, *send(source, sent, EVERYTHING))
    assert torch.equal(target.data[:, :, [9, 0, 3]], source.data[:, :, [5, 6, 7]].float())
    assert landing.codecs == (RAW,) and codecs_of(source.layout) == ()


def test_what_is_quantized_is_not_converted() -> None:
    for ours, theirs in (("int8/float32", "float32"), ("int8/float32", "fp8/float32")):
        assert not converts(ours, theirs) and converts(ours, ours)
        with pytest.raises(HandoffRefused, match=f"dtype is '{ours}' at prefill and '{theirs}'"):
            handoff_block_size(layout(ours), layout_to_pb(layout(theirs)))
    assert not converts("bfloat16", "float16") and not converts("bfloat16", "int2/bfloat16")
    quantized = KVCache(layout("int8/float32"), 16)
    assert Landing(quantized, quantized.layout, holding(quantized, [1, 2, 3])).codecs == (RAW,)


def test_a_policy_with_state_needs_one_dtype() -> None:
    target = KVCache(layout("float32"), 10)
    seq = Sequence([1] * TOKENS, SamplingParams(), kv_policy=parse_policy("h2o(budget=16)"))
    seq.block_table = [1, 2, 3]
    with pytest.raises(HandoffRefused, match="h2o needs caches of one dtype"):
        Landing(target, layout("bfloat16"), seq)
