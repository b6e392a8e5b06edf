"""Caches that differ: blocks of another size are re-mapped on the way, all else is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from baton.engine.kv_cache import KVCache
from baton.engine.kv_layout import KVLayout
from baton.engine.llm import LLM
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import NO_BLOCK, Sequence
from baton.engine.transfer.base import HandoffRefused
from baton.engine.transfer.payload import SequenceReader, smaller_blocks, write_payload
from baton.engine.transfer.plan import FramePlan
from baton.worker.translate import handoff_block_size, layout_to_pb
from prefill_service.handoff import Handoff
from tests.support.client import PairClient, sampling_pb
from tests.support.families import reference_model
from tests.support.tiny import run_decode, run_prefill
from tests.support.transport_pair import NAMES, offline, random_prompt, transport_of

LAYOUT = KVLayout("f", 3, 2, 8, 16, "bfloat16", ("full",) * 3)


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> LLM:
    return LLM(tiny_llama, "float32", num_blocks=256, block_size=4, enable_prefix_cache=False)


@pytest.mark.parametrize("transport", ["shm", "torch", "grpc"])
@pytest.mark.parametrize(("ours", "theirs"), [(4, 16), (16, 4)])
async def test_prompts_pass_between_blocks_of_different_sizes(
    tiny_llama: Path, llm: LLM, transport: str, ours: int, theirs: int
) -> None:
    """Ends of blocks, partial last blocks, and a prefix that decode holds in its own blocks."""
    async with (
        run_prefill(tiny_llama, transport=transport, block_size=ours) as prefill,
        run_decode(tiny_llama, transport=transport, block_size=theirs) as decode,
        PairClient(prefill, decode) as client,
    ):
        shared = random_prompt(37, 9)
        lengths, sent = (1, 4, 15, 16, 17, 37), []
        for prompt in [random_prompt(n, n) for n in lengths] + [shared, [*shared, 5, 6, 7, 8]]:
            served = await client.serve(prompt, sampling_pb(ignore_eos=True))
            assert served.texts() == offline(llm, prompt, ignore_eos=True)
            assert served.prefill_done is not None
            sent.append(served.prefill_done.blocks_sent)
        # In blocks of 4, the smaller size; decode holds 2 blocks of 16, or 9 of 4, of the last one.
        held = 8 if theirs == 16 else 9
        assert sent == [1, 1, 4, 4, 5, 10, 10, 11 - held]
        await prefill.wait_idle()
        await decode.wait_idle()


def keep_until_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the event loop is busy: nothing is shipped before the last chunk is computed."""
    monkeypatch.setattr(Handoff, "advance", lambda self, *_: self.sender.open())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("transport", ["shm", "torch", "grpc"])
async def test_blocks_that_larger_ones_of_decode_reach_into_are_shipped_whenever_they_leave(
    tmp_path: Path, transport: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows that end inside of decode's blocks: prefill gave back what these hold before, and
    what left late was another's or nobody's; the client was told that its request was wrong."""
    reference_model("mistral", spread=0.4, sliding_window=30).save_pretrained(tmp_path)
    prompt = [3 + i % 80 for i in range(103)]
    alone = LLM(tmp_path, "float32", num_blocks=64, block_size=4, enable_prefix_cache=False)
    expected = offline(alone, prompt, ignore_eos=True, max_tokens=4)
    if late:
        keep_until_computed(monkeypatch)
    small: dict[str, Any] = {"block_size": 4, "chunk_size": 16, "max_num_seqs": 8}
    async with (
        run_prefill(tmp_path, transport=transport, **small) as prefill,
        run_decode(tmp_path, transport=transport, block_size=16) as decode,
        PairClient(prefill, decode) as client,
    ):
        for _ in ("computed", "cached at prefill"):
            served = await client.serve(prompt, sampling_pb(ignore_eos=True, max_tokens=4))
            assert served.texts() == expected
            assert transport_of(served) == NAMES[transport]
            await decode.wait_idle()
            decode.parts.engine.apply(decode.parts.engine.blocks.flush)
        await prefill.wait_idle()


async def test_blocks_that_cannot_be_read_are_no_fault_of_the_request(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INVALID_ARGUMENT is the client's 400: it was told of rows that do not exist."""

    def read_nothing(*_: Any) -> Any:
        raise ValueError("rows must be in [0, 64): [-1]")

    monkeypatch.setattr(SequenceReader, "blocks", read_nothing)
    async with (
        run_prefill(tiny_llama) as prefill,
        run_decode(tiny_llama) as decode,
        PairClient(prefill, decode) as client,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await client.serve(random_prompt(30), sampling_pb())
        assert failed.value.code() is grpc.StatusCode.INTERNAL
        assert "rows" not in (failed.value.details() or "")
        await prefill.wait_idle()
        await decode.wait_idle()


@pytest.mark.parametrize(("ours", "theirs"), [(16, 32), (32, 16), (8, 24), (24, 8), (12, 18)])
@pytest.mark.parametrize("tokens", [1, 24, 47, 48, 96])
def test_every_token_lands_in_its_place_whatever_the_two_block_sizes(
    ours: int, theirs: int, tokens: int
) -> None:
    source = KVCache(dataclasses.replace(LAYOUT, block_size=ours), 20)
    target = KVCache(dataclasses.replace(LAYOUT, block_size=theirs), 20)
    source.data.normal_(generator=torch.Generator().manual_seed(1))
    size = handoff_block_size(source.layout, layout_to_pb(target.layout))
    tables = [[(7 * i + 3) % 20 for i in range(-(-tokens // n))] for n in (ours, theirs)]
    seq = Sequence([1] * tokens, SamplingParams())
    seq.block_table = tables[0]
    reader = SequenceReader(source.in_blocks_of(size), seq, True, ours // size)
    plan = FramePlan(0, 3, tuple(range(-(-tokens // size))))
    payload = torch.empty(reader.num_bytes(plan), dtype=torch.uint8)
    checksum = reader.read(plan, payload)
    mine = smaller_blocks(tables[1], theirs // size)
    write_payload(target.in_blocks_of(size), plan, payload, checksum, mine)

    def slots(cache: KVCache, table: list[int]) -> torch.Tensor:
        n = cache.layout.block_size
        places = [table[t // n] * n + t % n for t in range(tokens)]
        return torch.stack([layer[:, places] for layer in cache.slots])

    assert torch.equal(slots(source, tables[0]), slots(target, tables[1]))
    untouched = [b for b in range(20) if b not in tables[1]]
    assert not target.data[:, :, untouched].any()


def test_a_block_that_was_given_back_is_never_another_sequences() -> None:
    assert smaller_blocks([NO_BLOCK, NO_BLOCK, 5], 2) == [10, 11, 10, 11, 10, 11]
    assert smaller_blocks([NO_BLOCK, 5], 1) == [NO_BLOCK, 5]


DIFFERENT: dict[str, Any] = {
    "fingerprint": "g",
    "num_layers": 4,
    "num_kv_heads": 1,
    "head_dim": 16,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_caches_that_differ_are_refused_with_both_values(name: str) -> None:
    changes = {name: DIFFERENT[name]}
    if name == "num_layers":
        changes["layer_kinds"] = ("full",) * 4
    ours = dataclasses.replace(LAYOUT, dtype="int8/bfloat16")
    other = dataclasses.replace(ours, **changes)
    here, there = getattr(ours, name), DIFFERENT[name]
    with pytest.raises(
        HandoffRefused, match=f"{name} is {here!r} at prefill and {there!r} at decode"
    ):
        handoff_block_size(ours, layout_to_pb(other))


def test_quantized_blocks_of_different_sizes_are_refused() -> None:
    small, large = (
        dataclasses.replace(LAYOUT, dtype="int8/bfloat16", block_size=n) for n in (16, 32)
    )
    with pytest.raises(HandoffRefused, match="block_size is 16 at prefill and 32 at decode"):
        handoff_block_size(small, layout_to_pb(large))


@pytest.mark.parametrize("kinds", [("int8", "auto"), ("int8", "fp8")])
async def test_a_pair_with_different_kv_dtypes_is_refused_before_anything_is_computed(
    tiny_llama: Path, kinds: tuple[str, str]
) -> None:
    """Silent corruption at low load and a crash at high load, elsewhere."""
    async with (
        run_prefill(tiny_llama, kv_dtype=kinds[0]) as prefill,
        run_decode(tiny_llama, kv_dtype=kinds[1]) as decode,
        PairClient(prefill, decode) as client,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.serve(random_prompt(30), sampling_pb())
        details = refused.value.details() or ""
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        theirs = "float32" if kinds[1] == "auto" else f"{kinds[1]}/float32"
        assert "'int8/float32' at prefill" in details and f"{theirs!r} at decode" in details
        assert prefill.parts.engine.scheduler.prefill_tokens_computed == 0
        await prefill.wait_idle()
        await decode.wait_idle()
