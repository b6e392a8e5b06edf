"""KV encoded on its way, or kept in another dtype on the other side: the tokens are those of a
definition, computed offline without any hand-off."""

import asyncio
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from baton.engine.kv.codec import BlockCodec
from baton.engine.kv.quantized_sizes import QuantizedSizes
from baton.engine.kv_stores import KVStore, Place
from baton.engine.llm import LLM
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import Sequence
from baton.engine.transfer.plan import FramePlan
from prefill_service import encoding
from tests.support.client import PairClient, Served, sampling_pb
from tests.support.handoffs import FIRST, by_hand, lying, until, whole_block
from tests.support.tiny import run_decode, run_prefill
from tests.support.transport_pair import offline, random_prompt, transport_of

BLOCK = 4
LENGTHS = (1, 9, 70)


class Offline:
    """An engine that stops after the prompt, shows its cache, lets it be written, and goes on."""

    def __init__(self, path: Path, kv_dtype: str = "auto") -> None:
        llm = LLM(path, "float32", num_blocks=256, block_size=BLOCK, kv_dtype=kv_dtype,
                  enable_prefix_cache=False)  # fmt: skip
        self.engine: Any = llm.engine
        self.cache = self.engine._runner.kv_cache
        self.store = KVStore.of(self.cache.layout, torch.float32)
        self._llm = llm

    def prefill(self, prompt: list[int], max_tokens: int) -> Sequence:
        seq = self._llm._sequence(
            prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        )
        self.engine.add(seq)
        self.engine.step()
        return self.engine.scheduler.running[0] if self.engine.scheduler.running else seq

    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self.cache.slots, self.cache.tables, strict=True))

    def finish(self, seq: Sequence) -> list[int]:
        while self.engine.scheduler.has_work():
            self.engine.step()
        return seq.token_ids[seq.num_prompt_tokens :]


@lru_cache
def _offline(path: Path, kv_dtype: str = "") -> Offline:
    """ "" is the plain one that computes prompts."""
    return Offline(path, kv_dtype or "auto")


def through(codec: str, kv: torch.Tensor) -> torch.Tensor:
    if codec == "raw":
        return kv
    full, shape = len(kv) // BLOCK * BLOCK, kv.shape[1:]
    block_codec = BlockCodec(QuantizedSizes(codec, BLOCK, shape[1], shape[2]))
    done = block_codec.decode(block_codec.encode(kv[:full].view(-1, BLOCK, *shape)))
    return torch.cat((done.view(full, *shape), kv[full:]))


def defined(
    path: Path, prompt: list[int], codec: str, kv_dtype: str = "auto", max_tokens: int = 12
) -> list[int]:
    """Prefill's keys and values go through the codec and into a cache of decode's kind, which
    goes on from prefill's first token."""
    ours, theirs = _offline(path), _offline(path, kv_dtype)
    sent, here = ours.prefill(prompt, max_tokens), theirs.prefill(prompt, max_tokens)
    for layer, target in zip(ours.layers(), theirs.layers(), strict=True):
        kv = ours.store.read(layer, Place.of(sent), len(prompt))
        theirs.store.write(target, Place.of(here), through(codec, kv.contiguous()))
    here.token_ids[-1] = sent.token_ids[-1]
    ours.finish(sent)
    return theirs.finish(here)


@pytest.mark.parametrize(
    ("codec", "transport", "kv_dtype"),
    [
        ("int8", "grpc", "auto"),
        ("int4", "torch", "auto"),
        ("raw", "shm", "int8"),
        ("int4", "grpc", "int4"),
        ("fp8", "torch", "int8"),
    ],
)
async def test_tokens_are_those_of_the_prompts_kv_through_the_codec_into_that_cache(
    tiny_llama: Path, codec: str, transport: str, kv_dtype: str
) -> None:
    async with (
        run_prefill(tiny_llama, transport=transport, wire_codec=codec) as prefill,
        run_decode(tiny_llama, transport=transport, kv_dtype=kv_dtype, num_blocks=128) as decode,
        PairClient(prefill, decode) as client,
    ):
        for length in LENGTHS:
            prompt = random_prompt(length, length)
            served = await client.serve(prompt, sampling_pb(max_tokens=12, ignore_eos=True))
            assert served.texts() == [defined(tiny_llama, prompt, codec, kv_dtype)]
            assert transport_of(served).startswith(transport)
            assert sent(served) == prefill_bytes(length, codec)
        await prefill.wait_idle()
        await decode.wait_idle()
        (link,) = prefill.status.record().links
        assert link.token_bytes == prefill_bytes(BLOCK, codec) // BLOCK
        assert decode.status.activity.transfers.bytes == sum(
            prefill_bytes(length, codec) for length in LENGTHS
        )


def prefill_bytes(length: int, codec: str) -> int:
    """2 layers of 2 heads of 8: a block of 4 float32 tokens takes 1,024 bytes."""
    full, rest = divmod(length, BLOCK)
    block = 1024 if codec == "raw" else 2 * QuantizedSizes(codec, BLOCK, 2, 8).row_bytes
    return full * block + (1024 if rest else 0)


def sent(served: Served) -> int:
    assert served.prefill_done is not None
    return served.prefill_done.bytes_sent


async def test_nothing_that_was_encoded_is_shared_and_exact_prefixes_still_are(
    tiny_llama: Path,
) -> None:
    """A prompt that decode computed itself is cached there; one that came encoded is not."""
    async with (
        run_prefill(tiny_llama, transport="grpc", wire_codec="int4") as prefill,
        run_decode(tiny_llama, transport="grpc") as decode,
        PairClient(prefill, decode) as client,
    ):
        prompt, sampling = random_prompt(41, 5), sampling_pb(max_tokens=3, ignore_eos=True)
        llm = LLM(tiny_llama, "float32", num_blocks=256, block_size=BLOCK)
        exact = offline(llm, prompt, max_tokens=3, ignore_eos=True)
        for _ in range(2):
            served = await client.serve(prompt, sampling)
            assert served.prefill_done is not None and served.prefill_done.blocks_sent == 11
            assert decode.parts.engine.blocks.num_cached == 0
        # What decode computes from here is exact: nothing of the approximations is found.
        assert (await client.serve_on_decode(prompt, sampling)).texts() == exact
        assert decode.parts.engine.blocks.num_cached > 0
        served = await client.serve(prompt, sampling)
        assert served.prefill_done is not None and served.prefill_done.blocks_sent == 1
        await prefill.wait_idle()
        await decode.wait_idle()


async def test_shared_memory_stays_raw_and_a_fallback_from_it_is_encoded(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        run_prefill(tiny_llama, wire_codec="int8") as prefill,
        run_decode(tiny_llama) as decode,
        PairClient(prefill, decode) as client,
    ):
        prompt, sampling = random_prompt(40, 1), sampling_pb(max_tokens=2, ignore_eos=True)
        assert sent(await client.serve(prompt, sampling)) == prefill_bytes(40, "raw")

        def gone(*args: Any) -> Any:
            raise OSError("on purpose")

        decode.transfer.pools.close()
        monkeypatch.setattr("baton.engine.transfer.shm._map", gone)
        prompt = random_prompt(40, 2)
        served = await client.serve(prompt, sampling)
        assert sent(served) == prefill_bytes(40, "int8") and transport_of(served) != "shm"
        assert served.texts() == [defined(tiny_llama, prompt, "int8", max_tokens=2)]
        await prefill.wait_idle()
        await decode.wait_idle()


@pytest.mark.parametrize(("transport", "name"), [("grpc", "grpc"), ("torch", "torch:gloo")])
async def test_auto_measures_its_links_and_encodes_what_a_slow_one_would_hold_up(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, transport: str, name: str
) -> None:
    monkeypatch.setattr(encoding, "LEAST_BYTES", 1)
    async with (
        run_prefill(tiny_llama, transport=transport, wire_codec="auto") as prefill,
        run_decode(tiny_llama, transport=transport) as decode,
        PairClient(prefill, decode) as client,
    ):
        sampling = sampling_pb(max_tokens=5, ignore_eos=True)
        assert sent(await client.serve(random_prompt(40, 1), sampling)) == prefill_bytes(40, "raw")
        (pair,) = prefill.transfer._pairs.values()
        assert pair.rates.get(f"{name} raw", time.monotonic()) > 0
        for _ in range(40):  # a link of a few bytes per second, as far as it was measured
            pair.rates.saw(f"{name} raw", 1.0, 1.0, time.monotonic())
        pair.rates.saw(f"{name} int8", 1000.0, 1.0, time.monotonic())
        prompt = random_prompt(41, 2)
        served = await client.serve(prompt, sampling)
        assert sent(served) == prefill_bytes(41, "int8")
        assert served.texts() == [defined(tiny_llama, prompt, "int8", max_tokens=5)]
        await prefill.wait_idle()
        await decode.wait_idle()


LIES: dict[str, Any] = {
    "a codec nobody knows": (lambda n, p: (n, FramePlan(0, 2, p.positions, "zip")), "codec 'zip'"),
    "a codec that it is not": (lambda n, p: (n, FramePlan(0, 2, p.positions, "fp8")), "came as"),
}


@pytest.mark.parametrize("name", LIES)
async def test_a_frame_of_another_codec_is_refused_and_no_block_is_lost(
    tiny_llama: Path, name: str
) -> None:
    lie, message = LIES[name]
    async with (
        run_prefill(tiny_llama, transport="grpc") as prefill,
        run_decode(tiny_llama, transport="grpc") as decode,
        PairClient(prefill, decode) as client,
    ):
        call, reservation = await client.reserve(random_prompt(12), sampling_pb())
        sender = by_hand(prefill, reservation, 3)
        with lying(lie), pytest.raises(Exception, match=message):
            await sender.send(whole_block(0))
            await sender.commit(FIRST)
        await sender.abort()
        call.cancel()
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await call.code()
            raise asyncio.CancelledError
        await until(lambda: decode.status.activity.transfers.handoffs_failed == 1)
        await decode.wait_idle()
