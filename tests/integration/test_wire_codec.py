"""KV encoded on its way, or kept in another dtype on the other side: the tokens are those of a
definition, computed offline without any hand-off."""

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.engine.kv.quantized_sizes import QuantizedSizes
from baton.engine.llm import LLM
from baton.engine.transfer.plan import FramePlan
from baton.v1 import common_pb2
from prefill_service import encoding
from tests.support.client import PairClient, Served, sampling_pb
from tests.support.families import reference_model
from tests.support.handoffs import FIRST, by_hand, lying, until, whole_block
from tests.support.tiny import VOCAB, run_decode, run_prefill
from tests.support.transport_pair import offline, random_prompt, transport_of
from tests.support.wire_definition import BLOCK, defined

LENGTHS = (1, 9, 70)


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


POLICIES = {  # and tokens that they leave of 70
    "snapkv(budget=0.5,window=8)": 35,
    "streaming(sinks=4,window=24)": 30,
    "h2o(budget=18)": 18,
}


@pytest.mark.parametrize(
    ("policy", "codec", "transport", "kv_dtype"),
    [
        ("snapkv(budget=0.5,window=8)", "int8", "grpc", "auto"),
        ("snapkv(budget=0.5,window=8)", "int4", "torch", "int4"),
        ("snapkv(budget=0.5,window=8)", "raw", "shm", "int8"),
        ("streaming(sinks=4,window=24)", "fp8", "grpc", "auto"),
        ("streaming(sinks=4,window=24)", "int8", "torch", "fp8"),
        ("h2o(budget=18)", "int4", "grpc", "auto"),
    ],
)
async def test_what_a_policy_leaves_of_a_prompt_is_encoded_and_what_it_keeps_beside_it_is_not(
    tiny_llama: Path, policy: str, codec: str, transport: str, kv_dtype: str
) -> None:
    """Two choices of one prompt; both go on by the policy, over what came through the codec."""
    values: dict[str, Any] = {"transport": transport, "kv_policy": policy, "num_blocks": 128}
    async with (
        run_prefill(tiny_llama, wire_codec=codec, **values) as prefill,
        run_decode(tiny_llama, kv_dtype=kv_dtype, **values) as decode,
        PairClient(prefill, decode) as client,
    ):
        prompt, kept = random_prompt(70, 1), POLICIES[policy]
        served = await client.serve(prompt, sampling_pb(max_tokens=40, ignore_eos=True, n=2))
        wanted = defined(tiny_llama, prompt, codec, kv_dtype, 40, policy)
        assert served.texts() == [wanted, wanted]
        states = 1024 if policy.startswith("h2o") else 0  # a block of them
        assert sent(served) == prefill_bytes(kept, codec) + states
        assert decode.parts.engine.scheduler.prefill_tokens_computed == 0
        await prefill.wait_idle()
        await decode.wait_idle()


@pytest.mark.parametrize("policy", ["full", *POLICIES])
async def test_a_choice_of_a_lost_worker_goes_on_over_what_came_encoded(
    tiny_llama: Path, policy: str
) -> None:
    """Its tokens so far are computed exactly with the prompt, and encoded with it."""
    values: dict[str, Any] = {"transport": "grpc", "kv_policy": policy, "num_blocks": 128}
    async with (
        run_prefill(tiny_llama, wire_codec="int8", **values) as prefill,
        run_decode(tiny_llama, **values) as decode,
        PairClient(prefill, decode) as client,
    ):
        prompt, given = random_prompt(70, 1), random_prompt(9, 2)
        known = common_pb2.Continuation(choice=0, output_token_ids=given)
        served = await client.serve(
            prompt, sampling_pb(max_tokens=30, ignore_eos=True), continuation=known
        )
        wanted = defined(tiny_llama, prompt, "int8", "auto", 30, policy, given)
        assert served.texts() == [wanted] and wanted[:9] == given
        await prefill.wait_idle()
        await decode.wait_idle()


@pytest.mark.parametrize(("codec", "kv_dtype"), [("int8", "auto"), ("fp8", "int4")])
async def test_larger_blocks_of_prefill_are_encoded_in_decodes_size(
    tiny_llama: Path, codec: str, kv_dtype: str
) -> None:
    settings: dict[str, Any] = {"transport": "grpc", "wire_codec": codec, "block_size": 2 * BLOCK}
    async with (
        run_prefill(tiny_llama, **settings) as prefill,
        run_decode(tiny_llama, transport="grpc", kv_dtype=kv_dtype, num_blocks=128) as decode,
        PairClient(prefill, decode) as client,
    ):
        for length in LENGTHS:
            prompt = random_prompt(length, length)
            served = await client.serve(prompt, sampling_pb(max_tokens=12, ignore_eos=True))
            assert served.texts() == [defined(tiny_llama, prompt, codec, kv_dtype)]
            assert sent(served) == prefill_bytes(length, codec)
        await prefill.wait_idle()
        await decode.wait_idle()


@pytest.mark.parametrize(
    ("codec", "transport", "kv_dtype"),
    [("int8", "grpc", "auto"), ("fp8", "grpc", "int4"), ("raw", "shm", "int8")],
)
async def test_of_a_model_with_windows_what_the_next_token_sees_is_encoded(
    tmp_path: Path, codec: str, transport: str, kv_dtype: str
) -> None:
    model = reference_model("mistral", spread=0.4, vocab_size=VOCAB, sliding_window=9)
    model.save_pretrained(tmp_path)
    async with (
        run_prefill(tmp_path, transport=transport, wire_codec=codec) as prefill,
        run_decode(tmp_path, transport=transport, kv_dtype=kv_dtype, num_blocks=128) as decode,
        PairClient(prefill, decode) as client,
    ):
        for length, blocks in ((7, 2), (70, 3)):
            prompt = random_prompt(length, length)
            served = await client.serve(prompt, sampling_pb(max_tokens=30, ignore_eos=True))
            assert served.texts() == [defined(tmp_path, prompt, codec, kv_dtype, 30)]
            assert served.prefill_done is not None and served.prefill_done.blocks_sent == blocks
            await prefill.wait_idle()
            await decode.wait_idle()


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
