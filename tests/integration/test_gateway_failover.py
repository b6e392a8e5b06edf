"""A worker is lost in the middle of an answer: the answer goes on as if nothing had happened."""

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from router.exchange import Exchange
from router.text import TextModel
from tests.support.byte_model import byte_model
from tests.support.gateway import (
    COMPLETIONS,
    RunningGateway,
    joined,
    running_gateway,
    sse_events,
    until,
)
from tests.support.stub_workers import scripted

TEXT = "The quick brown fox jumps over the lazy dog. "
LONG = {"prompt": "x", "max_tokens": 60, "temperature": 0}
WHOLE = (TEXT * 2)[:60]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return byte_model(Path(tmp_path_factory.mktemp("model")))


async def stream_through_a_kill(
    gateway: RunningGateway, body: dict[str, Any], kill_after: int
) -> list[Any]:
    """All events of a stream whose decode worker is killed after some of them."""
    for worker in gateway.cluster.decodes:
        worker.behaviour.step_s = 0.005
    events: list[Any] = []
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with gateway.client.stream("POST", COMPLETIONS, json=request) as response:
        async for event in sse_events(response):
            events.append(event)
            if len(events) == kill_after:
                busy = [w for w in gateway.cluster.decodes if w.counters.running]
                await busy[0].kill()
    return events


@pytest.mark.parametrize("kill_after", [1, 2, 30, 55])
async def test_a_killed_decode_worker_leaves_no_gap_and_no_repeat(
    model: TextModel, kill_after: int
) -> None:
    async with running_gateway(model, scripted(TEXT), decodes=2) as gateway:
        events = await stream_through_a_kill(gateway, LONG, kill_after)
        assert joined(events) == (WHOLE, ["length"])
        usage = events[-2]["usage"]
        assert usage["prompt_tokens"] == 1 and usage["completion_tokens"] == 60
        assert events[-1] == "[DONE]"
        second = gateway.cluster.decodes[1].counters.requests[-1]
        assert (
            bytes(second.continuation.output_token_ids).decode()
            == WHOLE[: len(second.continuation.output_token_ids)]
        )


async def test_a_stream_older_than_the_queues_patience_waits_for_room_when_its_worker_is_lost(
    model: TextModel,
) -> None:
    """Its time in the queue counted from its arrival, so it ended at once with 503."""
    patience_s = 1.0
    async with running_gateway(
        model, scripted(TEXT), decodes=2, queue_timeout_s=patience_s
    ) as gateway:
        for worker in gateway.cluster.decodes:
            worker.behaviour.step_s = 0.03
        began = time.monotonic()
        asking = asyncio.create_task(gateway.events(COMPLETIONS, LONG))
        await until(lambda: time.monotonic() > began + 1.2 * patience_s)
        busy, other = sorted(gateway.cluster.decodes, key=lambda w: -w.counters.running)
        other.behaviour.capacity = 0
        await busy.kill()
        await until(lambda: other.counters.refused > 0)
        other.behaviour.capacity = 64
        gateway.cluster.directory.put(other.record)
        assert joined(await asking) == (WHOLE, ["length"])


async def test_a_stream_that_lost_its_worker_waits_for_room_although_the_queue_is_full(
    model: TextModel,
) -> None:
    """The bound of the queue counted it as a newcomer: it ended with 429 in mid-answer."""
    async with running_gateway(model, scripted(TEXT), decodes=2, max_queue=1) as gateway:
        for worker in gateway.cluster.decodes:
            worker.behaviour.step_s = 0.03
        streaming = asyncio.create_task(gateway.events(COMPLETIONS, LONG))
        prefill = gateway.cluster.prefills[0]
        decoded = [worker.counters for worker in gateway.cluster.decodes]
        await until(lambda: any(c.tokens_sent for c in decoded) and not prefill.counters.running)
        busy, other = sorted(gateway.cluster.decodes, key=lambda w: -w.counters.running)
        busy.behaviour.capacity = other.behaviour.capacity = 0
        asking = asyncio.create_task(gateway.post(COMPLETIONS, LONG))
        await until(lambda: gateway.gateway.admission.waiting == 1)
        await busy.kill()
        await until(lambda: gateway.gateway.admission.waiting == 2 or streaming.done())
        other.behaviour.capacity = 64
        gateway.cluster.directory.put(other.record)
        assert joined(await streaming) == (WHOLE, ["length"])
        assert (await asking).status_code == 200


async def test_every_choice_goes_on_from_where_it_stood(model: TextModel) -> None:
    def script(prompt: object, choice: int) -> list[int]:
        return list(f"choice {choice} says its own text. ".encode())

    async with running_gateway(model, script, decodes=2) as gateway:
        body = {**LONG, "n": 3, "temperature": 1, "logprobs": 1}
        events = await stream_through_a_kill(gateway, body, 40)
        for choice in range(3):
            expected = (f"choice {choice} says its own text. " * 3)[:60]
            assert joined(events, choice) == (expected, ["length"])
        entries = [e["choices"][0] for e in events[:-2] if e["choices"][0]["logprobs"]]
        counts = [
            sum(len(c["logprobs"]["tokens"]) for c in entries if c["index"] == i) for i in range(3)
        ]
        assert counts == [60, 60, 60]
        assert events[-2]["usage"]["completion_tokens"] == 180


async def test_a_stop_string_that_spans_the_loss_still_matches(model: TextModel) -> None:
    async with running_gateway(model, scripted(TEXT), decodes=2) as gateway:
        body = {**LONG, "stop": ["jumps over the"]}
        events = await stream_through_a_kill(gateway, body, 20)
        assert joined(events) == (TEXT[: TEXT.index("jumps")], ["stop"])


async def test_a_whole_answer_survives_two_losses(model: TextModel) -> None:
    async with running_gateway(model, scripted(TEXT), decodes=3) as gateway:
        for worker, at in zip(gateway.cluster.decodes, (10, 30, None), strict=True):
            if at is not None:
                worker.behaviour.fail, worker.behaviour.fail_at = grpc.StatusCode.UNAVAILABLE, at
        response = await gateway.post(COMPLETIONS, LONG)
        assert response.status_code == 200
        assert response.json()["choices"][0]["text"] == WHOLE
        assert response.json()["usage"]["completion_tokens"] == 60


async def test_attempts_are_bounded_and_the_last_failure_is_told_in_the_stream(
    model: TextModel,
) -> None:
    async with running_gateway(model, scripted(TEXT), decodes=5) as gateway:
        for number, worker in enumerate(gateway.cluster.decodes):
            worker.behaviour.fail = grpc.StatusCode.UNAVAILABLE
            worker.behaviour.fail_at = 5 * (number + 1)
        events = await gateway.events(COMPLETIONS, LONG)
        assert events[-1]["error"]["code"] == "worker_failed"
        text, reasons = joined(events[:-1])
        assert WHOLE.startswith(text) and reasons == []
        assert sum(w.counters.calls for w in gateway.cluster.decodes) == 3


LOST = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.INTERNAL]


@pytest.mark.parametrize("before", ["its first token", "its commit"])
@pytest.mark.parametrize("how", LOST, ids=lambda code: code.name)
async def test_a_lost_prefill_worker_is_replaced_for_the_same_promise_of_room(
    model: TextModel, how: grpc.StatusCode, before: str
) -> None:
    """The router once gave the promise up with its prefill worker and reserved again."""
    async with running_gateway(model, scripted(TEXT), prefills=2, decodes=2) as gateway:
        first, second = gateway.cluster.prefills
        first.behaviour.fail, first.behaviour.fail_at = how, int(before == "its commit")
        events = await gateway.events(COMPLETIONS, {**LONG, "logprobs": 1})
        assert joined(events) == (WHOLE, ["length"])
        logprobs = [e["choices"][0]["logprobs"] or {"tokens": []} for e in events[:-1]]
        shown = "".join("".join(entry["tokens"]) for entry in logprobs)
        assert shown == WHOLE, "the first token was shown twice"
        assert sum(w.counters.calls for w in gateway.cluster.decodes) == 1
        (old,), (new,) = first.counters.requests, second.counters.requests
        assert new.destination.id == old.destination.id
        assert new.destination.generation == old.destination.generation + 1
        await until(lambda: gateway.cluster.running == 0)


async def test_without_another_prefill_worker_the_request_starts_over_with_a_new_promise(
    model: TextModel,
) -> None:
    async with running_gateway(model, scripted(TEXT), prefills=1, decodes=2) as gateway:
        (prefill,) = gateway.cluster.prefills
        prefill.behaviour.fail, prefill.behaviour.fail_times = grpc.StatusCode.DATA_LOSS, 1
        assert joined(await gateway.events(COMPLETIONS, LONG)) == (WHOLE, ["length"])
        assert prefill.counters.calls == 2
        assert sum(w.counters.calls for w in gateway.cluster.decodes) == 2


async def test_a_request_waits_for_the_heartbeat_of_a_suspect_when_nobody_else_is_left(
    model: TextModel,
) -> None:
    """After a router had been stopped for a while, it suspected everybody and answered 503."""
    async with running_gateway(model, scripted(TEXT)) as gateway:
        directory, (decode,) = gateway.cluster.directory, gateway.cluster.decodes
        directory.remove(decode.worker_id)
        directory.doubted = True
        request = asyncio.create_task(gateway.events(COMPLETIONS, LONG))
        await until(lambda: gateway.gateway.admission.running == 1)
        directory.put(decode.record)
        assert joined(await request) == (WHOLE, ["length"])


async def test_replacements_of_prefill_count_as_attempts(model: TextModel) -> None:
    async with running_gateway(model, scripted(TEXT), prefills=5) as gateway:
        for worker in gateway.cluster.prefills:
            worker.behaviour.fail = grpc.StatusCode.UNAVAILABLE
        response = await gateway.post(COMPLETIONS, LONG)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "worker_failed"
        assert sum(w.counters.calls for w in gateway.cluster.prefills) == 3
        await until(lambda: gateway.cluster.running == 0)


async def test_another_first_token_than_the_client_has_is_never_continued(
    model: TextModel,
) -> None:
    """In bf16 two prefill workers may part at a near-tie: the promise of the one that
    contradicts is dropped, and the answer goes on from the token that was shown."""
    async with running_gateway(model, scripted(TEXT), prefills=3, decodes=2) as gateway:
        first, second, _ = gateway.cluster.prefills
        shown = asyncio.Event()

        async def fail_once_shown(context: Any, index: int) -> None:
            if index == 1:
                await shown.wait()
                await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted failure")

        first._maybe_fail = fail_once_shown  # type: ignore[method-assign]
        second.behaviour.says = b"?"
        events = []
        request = {**LONG, "stream": True}
        async with gateway.client.stream("POST", COMPLETIONS, json=request) as response:
            async for event in sse_events(response):
                events.append(event)
                shown.set()
        assert joined(events) == (WHOLE, ["length"])
        calls = [c for w in gateway.cluster.decodes for c in w.counters.requests]
        assert [bytes(c.continuation.output_token_ids) for c in calls] == [b"", b"T"]


async def test_decode_lost_during_prefill_is_noticed_at_once_and_not_blamed_on_prefill(
    model: TextModel,
) -> None:
    """Prefill computes for long; waiting for it to notice would cost all of that time."""
    async with running_gateway(model, scripted(TEXT), prefills=2, decodes=2) as gateway:
        for prefill in gateway.cluster.prefills:
            prefill.behaviour.start_s = 30.0
        request = asyncio.create_task(gateway.events(COMPLETIONS, LONG))
        await until(lambda: any(p.counters.running for p in gateway.cluster.prefills))
        for prefill in gateway.cluster.prefills:
            prefill.behaviour.start_s = 0.0
        (busy,) = [w for w in gateway.cluster.decodes if w.counters.running]
        await busy.kill()
        async with asyncio.timeout(5):
            assert joined(await request) == (WHOLE, ["length"])
        assert gateway.cluster.directory.suspects == [busy.worker_id]


async def test_a_prefill_that_cannot_reach_decode_is_not_blamed_for_it(model: TextModel) -> None:
    """Prefill sees the loss of its peer a moment before the router does."""
    async with running_gateway(model, scripted(TEXT), prefills=2, decodes=2) as gateway:
        for prefill in gateway.cluster.prefills:
            prefill.behaviour.fail, prefill.behaviour.fail_at = grpc.StatusCode.ABORTED, 1
        request = asyncio.create_task(gateway.events(COMPLETIONS, LONG))
        await until(lambda: any(p.counters.calls for p in gateway.cluster.prefills))
        await until(lambda: not any(p.counters.running for p in gateway.cluster.prefills))
        for prefill in gateway.cluster.prefills:
            prefill.behaviour.fail = None
        (busy,) = [w for w in gateway.cluster.decodes if w.counters.running]
        await busy.kill()
        assert joined(await request) == (WHOLE, ["length"])
        assert gateway.cluster.directory.suspects == [busy.worker_id]


async def test_what_decode_began_counts_even_if_prefill_never_says_that_it_is_done(
    model: TextModel,
) -> None:
    """Stopped right after its commit: the answer once waited until prefill counted as lost."""
    async with running_gateway(model, scripted(TEXT), prefills=2) as gateway:
        gateway.cluster.prefills[0].behaviour.silent_after_commit = True
        async with asyncio.timeout(5):
            events = await gateway.events(COMPLETIONS, LONG)
        assert joined(events) == (WHOLE, ["length"])
        assert [w.counters.calls for w in gateway.cluster.prefills] == [1, 0]
        assert gateway.cluster.directory.suspects == []


async def test_a_decode_worker_that_falls_silent_in_an_answer_is_left_for_another(
    model: TextModel,
) -> None:
    """Its process answers pings, so no call breaks: the answer once waited for its own deadline."""
    async with running_gateway(model, scripted(TEXT), decodes=2, decode_timeout_s=0.5) as gateway:
        for worker in gateway.cluster.decodes:
            worker.behaviour.hang, worker.behaviour.fail_at = True, 30
        request = asyncio.create_task(gateway.events(COMPLETIONS, LONG))
        await until(lambda: any(w.counters.running for w in gateway.cluster.decodes))
        (busy,) = [w for w in gateway.cluster.decodes if w.counters.running]
        for worker in gateway.cluster.decodes:
            worker.behaviour.hang = worker is busy
        assert joined(await request) == (WHOLE, ["length"])
        assert gateway.cluster.directory.suspects == [busy.worker_id]


async def test_a_client_that_reads_slowly_is_no_silence_of_a_worker(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, sent = Exchange.send_events, itertools.count()

    async def slow(self: Exchange, events: bytes, last: bool = False) -> None:
        if next(sent) == 5:
            await asyncio.sleep(1.0)  # twice as long as a worker may be silent
        await send(self, events, last)

    monkeypatch.setattr(Exchange, "send_events", slow)
    async with running_gateway(model, scripted(TEXT), decode_timeout_s=0.5) as gateway:
        gateway.cluster.decodes[0].behaviour.step_s = 0.005
        assert joined(await gateway.events(COMPLETIONS, LONG)) == (WHOLE, ["length"])
        assert gateway.cluster.directory.suspects == []


@pytest.mark.parametrize("end", [{"max_tokens": 1}, {"stop_token_ids": [ord("T")]}])
@pytest.mark.parametrize("fails", [True, False])
async def test_an_answer_that_ends_with_its_first_token_needs_nothing_more_of_prefill(
    model: TextModel, end: dict[str, Any], fails: bool
) -> None:
    """It waited for prefill's last word for as long as prefill may be silent; and when prefill
    failed there, another one computed the whole prompt. (A failure may overtake the first token:
    not here.)"""
    async with running_gateway(model, scripted(TEXT), prefills=2) as gateway:
        for worker in gateway.cluster.prefills:
            worker.behaviour.silent_after_commit = not fails
            if fails:
                worker.behaviour.fail, worker.behaviour.fail_at = grpc.StatusCode.INTERNAL, 1
                worker.behaviour.fail_after_s = 0.5
        async with asyncio.timeout(20):
            answer = await gateway.post(COMPLETIONS, {**LONG, **end})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 1
        assert sum(w.counters.calls for w in gateway.cluster.prefills) == 1
        assert gateway.cluster.directory.suspects == []
        await until(lambda: gateway.cluster.running == 0)


async def test_a_prefill_that_decode_has_overtaken_is_let_go_with_its_request(
    model: TextModel,
) -> None:
    """It had not said that it is done when the client left: its call stayed for minutes."""
    async with running_gateway(model, scripted(TEXT)) as gateway:
        gateway.cluster.prefills[0].behaviour.silent_after_commit = True
        gateway.cluster.decodes[0].behaviour.hang = True
        gateway.cluster.decodes[0].behaviour.fail_at = 3
        async with gateway.client.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as got:
            await anext(sse_events(got))
            await until(lambda: gateway.cluster.decodes[0].counters.tokens_sent == 2)
        await until(lambda: gateway.cluster.running == 0)
        assert gateway.cluster.prefills[0].counters.cancelled == 1


async def test_nobody_is_told_that_a_first_token_would_be_late_which_has_come(
    model: TextModel,
) -> None:
    """Decode was lost, and there was no room elsewhere before the target for the first token had
    passed."""
    async with running_gateway(model, scripted(TEXT), queue_timeout_s=1.0) as gateway:
        (decode,) = gateway.cluster.decodes
        decode.behaviour.step_s = 0.02
        slo = {"ttft_ms": 900, "policy": "reject"}
        request = asyncio.create_task(gateway.events(COMPLETIONS, {**LONG, "slo": slo}))
        await until(lambda: decode.counters.tokens_sent > 2)
        decode.behaviour.capacity, decode.behaviour.fail = 0, grpc.StatusCode.INTERNAL
        last = (await request)[-1]
        assert "error" in last and last["error"]["code"] != "targets_unattainable"


async def test_many_streams_survive_the_same_kill(model: TextModel) -> None:
    async with running_gateway(model, scripted(TEXT), decodes=2) as gateway:
        for worker in gateway.cluster.decodes:
            worker.behaviour.step_s = 0.01

        async def one() -> tuple[str, list[str]]:
            return joined(await gateway.events(COMPLETIONS, LONG))

        streams = [asyncio.create_task(one()) for _ in range(20)]
        await until(lambda: gateway.cluster.decodes[0].counters.tokens_sent > 60)
        await gateway.cluster.decodes[0].kill()
        assert await asyncio.gather(*streams) == [(WHOLE, ["length"])] * 20
