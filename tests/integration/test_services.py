"""Prefill and decode workers over real gRPC, against the offline LLM, in fp32."""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.engine.engine import Engine
from baton.engine.llm import LLM
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import QueueFull
from baton.engine.sequence import Sequence
from baton.v1 import (
    common_pb2,
    decode_pb2,
    kv_pb2,
    kv_pb2_grpc,
    prefill_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from baton.worker import prompt_cache
from decode_service.reservations import Reservations
from tests.support.client import PairClient, sampling_pb
from tests.support.tiny import VOCAB, RunningWorker, run_decode, run_prefill

BLOCK = 4
CHUNK = 64


@dataclass
class Pair:
    prefill: RunningWorker
    decode: RunningWorker
    client: PairClient

    async def settle(self) -> None:
        await self.prefill.wait_idle()
        await self.decode.wait_idle()


@pytest.fixture
async def pair(tiny_llama: Path) -> AsyncIterator[Pair]:
    async with (
        run_prefill(tiny_llama) as prefill,
        run_decode(tiny_llama) as decode,
        PairClient(prefill, decode) as client,
    ):
        yield Pair(prefill, decode, client)


@pytest.fixture(scope="session")
def llm(tiny_llama: Path) -> LLM:
    return LLM(tiny_llama, "float32", num_blocks=256, block_size=4, enable_prefix_cache=False)


def offline(llm: LLM, prompt: list[int], **sampling: object) -> list[list[int]]:
    params = {"temperature": 0.0, "seed": 1, **sampling}
    (choices,) = llm.generate([prompt], SamplingParams(**params))  # type: ignore[arg-type]
    return [choice.token_ids for choice in choices]


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


@pytest.mark.parametrize(
    "length", [1, 2, 3, 4, 5, 7, 8, 9, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7]
)
async def test_a_split_request_gives_the_offline_tokens_cold_and_warm(
    pair: Pair, llm: LLM, length: int
) -> None:
    prompt = random_prompt(length, length)
    expected = offline(llm, prompt, max_tokens=12)
    for attempt in range(3):
        served = await pair.client.serve(prompt, sampling_pb(max_tokens=12))
        assert served.texts() == expected
        assert served.started and served.prefill_done
        cached = 0 if attempt == 0 else (length - 1) // BLOCK * BLOCK
        assert served.started.num_cached_tokens == cached
        assert served.prefill_done.num_computed_tokens == length - cached
    transfers = pair.prefill.status.activity.transfers
    ended_at_once = len(expected[0]) == 1
    assert transfers.handoffs == (0 if ended_at_once else 3)
    assert pair.decode.status.activity.transfers.handoffs == transfers.handoffs
    assert pair.decode.parts.engine.scheduler.prefill_tokens_computed == 0, "silent re-prefill"
    await pair.settle()


async def test_queue_and_compute_are_told_apart_also_for_a_prompt_of_one_chunk(pair: Pair) -> None:
    """The clock once started after the first chunk: compute of a short prompt took no time."""
    runner = pair.prefill.parts.engine._runner
    compute = runner.run

    def slowly(batch):  # type: ignore[no-untyped-def]
        time.sleep(0.5)
        return compute(batch)

    runner.run = slowly
    served = await pair.client.serve(random_prompt(9), sampling_pb(ignore_eos=True))
    assert served.started and served.prefill_done
    assert served.started.queue_s < 0.5
    assert served.prefill_done.compute_s >= 0.5


async def test_blocks_that_decode_holds_are_not_sent_again(pair: Pair, llm: LLM) -> None:
    prompt = random_prompt(22)
    first = await pair.client.serve(prompt, sampling_pb())
    again = await pair.client.serve(prompt, sampling_pb())
    assert first.prefill_done and again.prefill_done
    assert first.prefill_done.blocks_sent == 6
    assert again.prefill_done.blocks_sent == 1, "only the partly filled last block"
    assert again.texts() == first.texts() == offline(llm, prompt)


async def test_a_prompt_wholly_held_by_decode_still_commits_and_frees_prefill(pair: Pair) -> None:
    """A full hit on decode once left prefill waiting for a "done" that nobody sent."""
    prompt = random_prompt(17)
    first = await pair.client.serve(prompt, sampling_pb())
    for _ in range(20):
        served = await pair.client.serve(prompt[:16], sampling_pb())
        assert served.texts()[0]
    served = await pair.client.serve(prompt[:16], sampling_pb(max_tokens=4))
    assert first.texts() and served.prefill_done and served.decode_done
    assert served.prefill_done.blocks_sent <= 1
    await pair.settle()


async def test_four_choices_prefill_and_ship_the_prompt_once(pair: Pair, llm: LLM) -> None:
    prompt = random_prompt(30)
    params = {"temperature": 1.0, "seed": 42, "n": 4, "max_tokens": 10}
    served = await pair.client.serve(prompt, sampling_pb(**params))
    assert served.texts() == offline(llm, prompt, **params)
    assert len({tuple(text) for text in served.texts()}) == 4
    assert pair.prefill.parts.engine.scheduler.prefill_tokens_computed == 30
    assert served.prefill_done and served.prefill_done.blocks_sent == 8
    assert pair.decode.status.activity.transfers.blocks == 8
    await pair.settle()


@pytest.mark.parametrize("choice_count", [1, 3])
async def test_max_tokens_one_needs_no_decode(pair: Pair, llm: LLM, choice_count: int) -> None:
    params = {"temperature": 1.0, "seed": 5, "n": choice_count, "max_tokens": 1}
    request = prefill_pb2.PrefillRequest(
        request_id="r", prompt_token_ids=random_prompt(9), sampling=sampling_pb(**params)
    )
    events = [event async for event in pair.client.prefill.Prefill(request, timeout=30)]
    tokens = events[1].first_tokens.tokens
    assert [[t.token_id] for t in tokens] == offline(llm, random_prompt(9), **params)
    assert all(t.finish_reason == common_pb2.FINISH_REASON_LENGTH for t in tokens)
    assert events[2].done.finished and events[2].done.blocks_sent == 0
    await pair.settle()


async def test_a_stop_on_the_first_token_ends_at_prefill_and_hands_nothing_over(
    pair: Pair, llm: LLM
) -> None:
    """Layers that left before the token was known are discarded; the last ones never leave."""
    prompt = random_prompt(9)
    stop = offline(llm, prompt)[0][0]
    served = await pair.client.serve(prompt, sampling_pb(stop_token_ids=[stop]))
    assert served.texts() == [[stop]]
    assert served.reasons == {0: common_pb2.FINISH_REASON_STOP}
    assert pair.decode.status.activity.transfers.handoffs == 0
    await pair.settle()


async def test_decode_alone_gives_the_same_tokens_and_says_what_it_computed(
    pair: Pair, llm: LLM
) -> None:
    prompt = random_prompt(70)
    params = {"temperature": 0.9, "seed": 8, "n": 2}
    served = await pair.client.serve_on_decode(prompt, sampling_pb(**params))
    assert served.texts() == offline(llm, prompt, **params)
    assert pair.decode.parts.engine.scheduler.prefill_tokens_computed == 70
    again = await pair.client.serve_on_decode(prompt, sampling_pb(**params))
    assert again.decode_done and again.decode_done.num_cached_tokens == 68
    await pair.settle()


async def test_decode_gives_back_a_prompt_whose_cached_beginning_has_gone(pair: Pair) -> None:
    """An evicted prefix was computed again beside those who decode: a token took them as long as
    a chunk, and the router had thought better of it."""
    prompt, sampling = random_prompt(70), sampling_pb(max_tokens=2)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await pair.client.serve_on_decode(prompt, sampling, max_uncached=20)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "70 tokens of the prompt are not cached, 20 may be" in (refused.value.details() or "")
    await pair.settle()
    await pair.client.serve_on_decode(prompt, sampling)
    again = await pair.client.serve_on_decode(prompt, sampling, max_uncached=20)
    assert again.decode_done and again.decode_done.num_cached_tokens == 68
    await pair.settle()


async def test_a_prompt_that_is_being_computed_for_another_counts_as_cached(pair: Pair) -> None:
    prompt, sampling = random_prompt(70), sampling_pb(max_tokens=2)
    scheduler = pair.decode.parts.engine.scheduler
    first = asyncio.create_task(pair.client.serve_on_decode(prompt, sampling))
    await _until(lambda: scheduler.has_work() or scheduler.prefill_tokens_computed)
    second = await pair.client.serve_on_decode([*prompt, 7], sampling, max_uncached=20)
    assert (await first).decode_done and second.decode_done
    assert scheduler.prefill_tokens_computed == 70 + 3
    await pair.settle()


async def test_sampling_survives_the_split(pair: Pair, llm: LLM) -> None:
    for seed in range(6):
        params = {
            "temperature": 0.8,
            "seed": seed,
            "top_k": 40,
            "top_p": 0.9,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
            "min_tokens": 5,
            "max_tokens": 20,
        }
        prompt = random_prompt(12 + seed, seed)
        served = await pair.client.serve(prompt, sampling_pb(**params))
        assert served.texts() == offline(llm, prompt, **params)


@pytest.mark.parametrize("done", [1, 4, 5, 11, 19])
async def test_a_choice_goes_on_elsewhere_with_the_tokens_it_would_have_given(
    pair: Pair, llm: LLM, done: int
) -> None:
    """Seeds, penalties, minimum length and logprobs all follow from the tokens so far."""
    params = {
        "temperature": 0.9,
        "seed": 11,
        "max_tokens": 20,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.4,
        "min_tokens": 15,
        "logprobs": 2,
    }
    prompt = random_prompt(21)
    whole = offline(llm, prompt, **params, n=3)[2]
    continuation = common_pb2.Continuation(choice=2, output_token_ids=whole[:done])
    served = await pair.client.serve(prompt, sampling_pb(**params), continuation=continuation)
    assert served.tokens == {2: whole}
    assert served.prefill_done
    assert served.prefill_done.num_computed_tokens == len(prompt) + done
    assert len(served.logprobs[2]) == len(whole) - done
    await pair.settle()


async def test_concurrent_requests_in_a_tiny_pool_are_preempted_and_keep_their_text(
    tiny_llama: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have landed before the first step, or one might end before the other begins."""
    commit, landed = Reservations.commit, threading.Semaphore(0)

    def counted(*landing: Any) -> None:
        commit(*landing)
        landed.release()

    monkeypatch.setattr(Reservations, "commit", counted)
    async with (
        run_prefill(tiny_llama) as prefill,
        run_decode(tiny_llama, num_blocks=14) as decode,
        PairClient(prefill, decode) as client,
    ):
        runner, missing = decode.parts.engine._runner, [1, 2]
        run = runner.run

        def together(batch: Any) -> Any:
            while missing and landed.acquire(timeout=10):
                missing.pop()
            return run(batch)

        monkeypatch.setattr(runner, "run", together)
        prompts = [random_prompt(16, seed) for seed in (1, 2)]
        served = await asyncio.gather(
            *(client.serve(p, sampling_pb(max_tokens=24, ignore_eos=True)) for p in prompts)
        )
        for prompt, result in zip(prompts, served, strict=True):
            assert result.texts() == offline(llm, prompt, max_tokens=24, ignore_eos=True)
        assert sum(s.decode_done.num_preemptions for s in served if s.decode_done) >= 1
        await decode.wait_idle()


async def test_a_request_that_can_never_fit_is_refused_at_once(pair: Pair) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="never fit") as info:
        await pair.client.serve(random_prompt(200), sampling_pb(max_tokens=100))
    assert info.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await pair.client.serve(random_prompt(5), sampling_pb())).texts()


async def test_a_full_decode_says_so_before_any_prefill(pair: Pair) -> None:
    calls = [await pair.client.reserve(random_prompt(60, i), sampling_pb()) for i in range(4)]
    with pytest.raises(grpc.aio.AioRpcError) as info:
        call, _ = await pair.client.reserve(random_prompt(60, 9), sampling_pb())
    assert info.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for call, _ in calls:
        call.cancel()
    await pair.settle()


# --- cancellation: five stages ----------------------------------------------------------------


def prefill_request(
    prompt: list[int], reservation: common_pb2.Reservation, **sampling: object
) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(
        request_id="r",
        prompt_token_ids=prompt,
        sampling=sampling_pb(**sampling),
        destination=reservation,
    )


async def test_cancel_before_reserved_gives_everything_back(pair: Pair) -> None:
    request = decode_pb2.GenerateRequest(
        request_id="r", prompt_token_ids=random_prompt(20), sampling=sampling_pb()
    )
    for _ in range(20):
        call = pair.client.decode.Generate(request)
        call.cancel()
    await pair.settle()


async def test_cancel_between_reserved_and_the_first_frame_gives_everything_back(
    pair: Pair,
) -> None:
    call, _ = await pair.client.reserve(random_prompt(20), sampling_pb())
    assert pair.decode.parts.engine.blocks.num_promised == 6
    call.cancel()
    await pair.settle()


def opening(pair: Pair, reservation: common_pb2.Reservation, generation: int = 0) -> kv_pb2.KVFrame:
    layout = common_pb2.KVLayout(
        fingerprint="tiny",
        num_layers=2,
        num_kv_heads=2,
        head_dim=8,
        block_size=4,
        dtype="float32",
    )
    return kv_pb2.KVFrame(
        open=kv_pb2.KVOpen(
            secret=reservation.secret,
            reservation_id=reservation.id,
            generation=generation,
            incarnation=reservation.incarnation,
            layout=layout,
        )
    )


async def test_cancel_in_the_middle_of_the_frames_gives_everything_back(pair: Pair) -> None:
    call, reservation = await pair.client.reserve(random_prompt(20), sampling_pb())
    async with grpc.aio.insecure_channel(pair.decode.address) as channel:
        push = kv_pb2_grpc.KVTransferStub(channel).Push()
        await push.write(opening(pair, reservation))
        await _until(lambda: pair.decode.parts.engine.blocks.num_promised == 0)
        assert pair.decode.parts.engine.blocks.num_free < 64
        call.cancel()
        assert (await push.read()).refused
        await push.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await push.read()
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await pair.settle()


async def test_a_client_that_leaves_at_commit_or_later_gives_everything_back(pair: Pair) -> None:
    for events_to_read in (1, 2, 3):
        prompt = random_prompt(30, events_to_read)
        call, reservation = await pair.client.reserve(prompt, sampling_pb(max_tokens=200))
        prefill = pair.client.prefill.Prefill(
            prefill_request(prompt, reservation, max_tokens=200, ignore_eos=True)
        )
        events = aiter(prefill)
        for _ in range(events_to_read):
            await anext(events)
        prefill.cancel()
        call.cancel()
        await pair.settle()


async def test_clients_that_leave_at_random_moments_leak_nothing(pair: Pair, llm: LLM) -> None:
    rng = random.Random(4)

    async def one(seed: int) -> None:
        task = asyncio.create_task(
            pair.client.serve(
                random_prompt(rng.randrange(1, 150), seed),
                sampling_pb(max_tokens=rng.randrange(1, 60), n=rng.choice([1, 2])),
            )
        )
        await asyncio.wait({task}, timeout=rng.random() * 0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for batch in range(5):
        await asyncio.gather(*(one(batch * 10 + i) for i in range(6)))
    await pair.settle()
    prompt = random_prompt(40, 3)
    served = await pair.client.serve(prompt, sampling_pb())
    assert served.texts() == offline(llm, prompt)


async def test_a_stopped_choice_ends_alone(pair: Pair) -> None:
    prompt = random_prompt(10)
    params = {"n": 2, "temperature": 1.0, "max_tokens": 100, "ignore_eos": True}
    call, reservation = await pair.client.reserve(prompt, sampling_pb(**params))
    async for _ in pair.client.prefill.Prefill(prefill_request(prompt, reservation, **params)):
        continue
    counts = {0: 0, 1: 0}
    stopped_at = None
    async for event in call:
        for token in event.tokens.tokens:
            counts[token.choice] += 1
        if counts[1] == 5 and stopped_at is None:
            for secret, stops in ((b"", False), (bytes(16), False), (reservation.secret, True)):
                request = decode_pb2.StopChoiceRequest(
                    reservation_id=reservation.id, secret=secret, choice=1
                )
                stopped_at = await pair.client.decode.StopChoice(request)
                assert stopped_at.stopped == stops
    assert counts[0] == 99 and counts[1] < 99
    await pair.settle()


async def test_no_step_changes_the_queues_while_a_choice_is_looked_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was looked for without the engine's lock: what a step moved was skipped, and the stop
    lost."""
    engine, could_step = pair.decode.parts.engine, []
    find = engine.scheduler.find

    def look(group: int, choice: int | None = None) -> list[Sequence]:
        could_step.append(another_thread_could_step(engine))
        return find(group, choice)

    params = {"n": 2, "max_tokens": 2}
    call, reservation = await pair.client.reserve(random_prompt(10), sampling_pb(**params))
    monkeypatch.setattr(engine.scheduler, "find", look)
    request = decode_pb2.StopChoiceRequest(
        reservation_id=reservation.id, secret=reservation.secret, choice=1
    )
    assert not (await pair.client.decode.StopChoice(request)).stopped
    assert could_step and not any(could_step)
    call.cancel()
    await pair.settle()


async def test_no_step_comes_between_a_prompt_and_its_pins(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step could give away the cached beginning that they were to keep."""
    could_step, pin_prompt = [], prompt_cache.pin_prompt

    def look(engine: Engine[Any], *pins: Any) -> None:
        could_step.append(another_thread_could_step(engine))
        pin_prompt(engine, *pins)

    monkeypatch.setattr(prompt_cache, "pin_prompt", look)
    for events in pinning(pair):
        async for _ in events:
            continue
    assert could_step == [False, False]
    for worker in (pair.prefill, pair.decode):
        assert len(list(worker.parts.engine.blocks.pins)) == 1
    await pair.settle()


async def test_a_prompt_that_is_not_taken_pins_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At prefill the pins came first, and stayed though the queue was full."""

    def full(*_: Any) -> None:
        raise QueueFull("full on purpose")

    for worker in (pair.prefill, pair.decode):
        monkeypatch.setattr(worker.parts.engine, "add", full)
    for events in pinning(pair):
        with pytest.raises(grpc.aio.AioRpcError, match="full on purpose"):
            async for _ in events:
                continue
    for worker in (pair.prefill, pair.decode):
        assert not list(worker.parts.engine.blocks.pins)
    await pair.settle()


def pinning(pair: Pair) -> list[Any]:
    """The events of a prompt that prefill computes, and of one that decode does."""
    common: dict[str, Any] = {
        "request_id": "r",
        "prompt_token_ids": random_prompt(70),
        "pins": [common_pb2.CachePin(num_tokens=20, ttl_s=60)],
    }
    prefill = prefill_pb2.PrefillRequest(**common, sampling=sampling_pb(max_tokens=1))
    decode = decode_pb2.GenerateRequest(
        **common, sampling=sampling_pb(max_tokens=2), prefill_here=True
    )
    return [pair.client.prefill.Prefill(prefill), pair.client.decode.Generate(decode)]


def another_thread_could_step(engine: Engine[Any]) -> bool:
    def take_lock() -> bool:
        if taken := engine._changed.acquire(blocking=False):
            engine._changed.release()
        return taken

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(take_lock).result()


# --- refusals of a hand-off -------------------------------------------------------------------


async def _push(pair: Pair, frames: list[kv_pb2.KVFrame]) -> grpc.aio.AioRpcError:
    async with grpc.aio.insecure_channel(pair.decode.address) as channel:

        async def stream() -> AsyncIterator[kv_pb2.KVFrame]:
            for frame in frames:
                yield frame

        with pytest.raises(grpc.aio.AioRpcError) as info:
            async for _ in kv_pb2_grpc.KVTransferStub(channel).Push(stream()):
                continue
        return info.value


async def test_a_layout_that_differs_is_refused_with_both_values(pair: Pair) -> None:
    call, reservation = await pair.client.reserve(random_prompt(20), sampling_pb())
    frame = opening(pair, reservation)
    frame.open.layout.dtype = "int8/float32"
    error = await _push(pair, [frame])
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "'float32'" in (error.details() or "") and "'int8/float32'" in (error.details() or "")
    call.cancel()
    await pair.settle()


async def test_a_stream_that_ends_without_commit_does_not_count_and_a_new_attempt_may_come(
    pair: Pair, llm: LLM
) -> None:
    prompt = random_prompt(20)
    call, reservation = await pair.client.reserve(prompt, sampling_pb())
    error = await _push(pair, [opening(pair, reservation)])
    assert error.code() is grpc.StatusCode.DATA_LOSS
    late = await _push(pair, [opening(pair, reservation, generation=0)])
    assert late.code() is grpc.StatusCode.FAILED_PRECONDITION and "late" in (late.details() or "")
    reservation.generation = 1
    tokens = []
    async for event in pair.client.prefill.Prefill(prefill_request(prompt, reservation)):
        tokens += [t.token_id for t in event.first_tokens.tokens]
    async for event in call:
        tokens += [t.token_id for t in event.tokens.tokens]
    assert [tokens] == offline(llm, prompt)
    await pair.settle()


@pytest.mark.parametrize("fault", ["flip", "drop", "repeat", "foreign block", "early commit"])
async def test_damaged_frames_never_become_text(pair: Pair, fault: str) -> None:
    prompt = random_prompt(20)
    call, reservation = await pair.client.reserve(prompt, sampling_pb())
    frames = [opening(pair, reservation)]
    import xxhash

    for sequence, block in enumerate(range(5)):
        payload = bytes(2 * 2 * 4 * 2 * 8 * 4)
        frames.append(
            kv_pb2.KVFrame(
                data=kv_pb2.KVData(
                    sequence=sequence,
                    layer_start=0,
                    layer_count=2,
                    blocks=[block],
                    payload=payload,
                    checksum=xxhash.xxh3_64_intdigest(payload),
                )
            )
        )
    commit = kv_pb2.KVCommit(num_frames=5, first_tokens=[common_pb2.Token(token_id=7)])
    frames.append(kv_pb2.KVFrame(commit=commit))
    if fault == "flip":
        frames[3].data.payload = b"\x01" + frames[3].data.payload[1:]
    elif fault == "drop":
        del frames[3]
    elif fault == "repeat":
        frames.insert(3, frames[3])
    elif fault == "foreign block":
        frames[3].data.blocks[0] = 77
    else:
        del frames[4:6]
        frames[-1].commit.num_frames = 3
    error = await _push(pair, frames)
    assert error.code() in (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.FAILED_PRECONDITION)
    assert not pair.decode.parts.engine.scheduler.running
    call.cancel()
    await pair.settle()


async def test_a_lease_without_a_hand_off_expires(tiny_llama: Path) -> None:
    async with (
        run_prefill(tiny_llama) as prefill,
        run_decode(tiny_llama, lease_s=0.2) as decode,
        PairClient(prefill, decode) as client,
    ):
        call, _ = await client.reserve(random_prompt(20), sampling_pb())
        with pytest.raises(grpc.aio.AioRpcError, match=r"0\.2 s") as info:
            await anext(aiter(call))
        assert info.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await decode.wait_idle()


async def test_a_draining_worker_refuses_new_requests_and_finishes_the_running(
    pair: Pair,
) -> None:
    prompt = random_prompt(10)
    params = {"max_tokens": 150, "ignore_eos": True}
    running = asyncio.create_task(pair.client.serve(prompt, sampling_pb(**params)))
    await _until(lambda: bool(pair.decode.parts.engine.scheduler.running))
    async with grpc.aio.insecure_channel(pair.decode.address) as channel:
        worker = worker_pb2_grpc.WorkerStub(channel)
        assert not (await worker.Drain(worker_pb2.DrainRequest(timeout_s=0.01))).drained
        with pytest.raises(grpc.aio.AioRpcError, match="draining") as info:
            await pair.client.serve(prompt, sampling_pb())
        assert info.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await worker.Drain(worker_pb2.DrainRequest(timeout_s=30))).drained
        info_message = await worker.GetInfo(worker_pb2.GetInfoRequest())
        assert info_message.load.draining and info_message.counters.handoffs == 1
    assert len((await running).texts()[0]) == 150


async def test_a_failing_step_ends_its_requests_with_an_error_and_nobody_else(
    pair: Pair, llm: LLM
) -> None:
    runner = pair.decode.parts.engine._runner
    compute = runner.run

    def fail(batch):  # type: ignore[no-untyped-def]
        runner.run = compute
        raise RuntimeError("boom")

    runner.run = fail
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await pair.client.serve(random_prompt(10), sampling_pb())
    assert info.value.code() is grpc.StatusCode.INTERNAL
    assert "boom" not in (info.value.details() or "")
    served = await pair.client.serve(random_prompt(10), sampling_pb())
    assert served.texts() == offline(llm, random_prompt(10))
    await pair.settle()


@pytest.mark.parametrize("broken", ["schedule", "postprocess"])
async def test_an_engine_that_fails_ends_all_its_requests_and_takes_no_more(
    pair: Pair, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread ended in silence, and every stream waited for ever."""

    scheduler = pair.decode.parts.engine.scheduler
    schedule = scheduler.schedule

    def fail(*_: Any) -> None:
        raise RuntimeError("boom")

    def when_two_run() -> Any:
        if len(scheduler.running) < 2:
            return None
        return fail() if broken == "schedule" else schedule()

    async def ask(seed: int) -> BaseException | None:
        call = pair.client.serve(random_prompt(10, seed), sampling_pb())
        (end,) = await asyncio.gather(call, return_exceptions=True)
        return end

    monkeypatch.setattr(scheduler, "postprocess", fail)
    monkeypatch.setattr(scheduler, "schedule", when_two_run)
    async with asyncio.timeout(10):
        ends = [*await asyncio.gather(ask(0), ask(1)), await ask(2)]
    for end in ends:
        assert isinstance(end, grpc.aio.AioRpcError) and end.code() is grpc.StatusCode.INTERNAL
        assert "computes nothing any more" in (end.details() or "")


async def _until(condition, timeout_s: float = 10.0) -> None:  # type: ignore[no-untyped-def]
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition never came true"
        await asyncio.sleep(0.005)
