"""All calls of a router to a worker share one stream of replies."""

import asyncio
import collections
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.worker import replies
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
from tests.support.stub_workers import StubCluster, StubWorker, scripted
from tests.support.tiny import run_decode

TEXT = "The quick brown fox jumps over the lazy dog. "
ASKED = {"prompt": "x", "max_tokens": 40, "temperature": 0}
WHOLE = TEXT[:40]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return byte_model(Path(tmp_path_factory.mktemp("model")))


class Router:
    """The calls of a router, by hand."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.name = secrets.token_bytes(16)
        self.messages: list[worker_pb2.ReplyBatch] = []
        self._worker = worker_pb2_grpc.WorkerStub(channel)
        self._decode = decode_pb2_grpc.DecodeStub(channel)
        self._reading: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for batch in self._worker.Replies(worker_pb2.RepliesRequest(stream=self.name)):
            self.messages.append(batch)

    async def opened(self) -> None:
        """How the stream ended."""
        assert self._reading is not None
        await self._reading

    async def generate(self, number: int, max_tokens: int = 12) -> list[Any]:
        """What the call itself says."""
        request = decode_pb2.GenerateRequest(
            prompt_token_ids=[number + 1, 2, 3],
            sampling=common_pb2.SamplingParams(
                max_tokens=max_tokens, n=1, top_p=1, repetition_penalty=1, ignore_eos=True
            ),
            prefill_here=True,
            reply_to=common_pb2.ReplyTo(stream=self.name, call=number),
        )
        return [event async for event in self._decode.Generate(request, timeout=20)]

    def events(self) -> list[tuple[int, int, decode_pb2.GenerateEvent]]:
        """Which message, which call, what."""
        return [
            (index, reply.call, decode_pb2.GenerateEvent.FromString(reply.event))
            for index, batch in enumerate(self.messages)
            for reply in batch.replies
        ]

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()


@asynccontextmanager
async def router_of(address: str) -> AsyncIterator[Router]:
    async with grpc.aio.insecure_channel(address) as channel:
        router = Router(channel)
        yield router
        router.close()


@pytest.fixture
async def stub() -> AsyncIterator[StubWorker]:
    cluster = StubCluster(scripted(TEXT))
    yield await cluster.add_decode()
    await cluster.stop()


async def test_what_a_step_drew_for_all_calls_is_one_message(tiny_llama: Path) -> None:
    async with run_decode(tiny_llama) as worker, router_of(worker.address) as router:
        router.open()
        said = await asyncio.gather(*(router.generate(number) for number in range(4)))
        assert said == [[], [], [], []], "events came by the calls as well"
        await until(lambda: sum(e.HasField("done") for _, _, e in router.events()) == 4)

        messages_of_step = collections.defaultdict(set)
        for index, _, event in router.events():
            if event.HasField("tokens"):
                messages_of_step[event.tokens.step.end].add(index)
        assert all(len(messages) == 1 for messages in messages_of_step.values())
        assert len(router.messages) < len(router.events()) / 2
        for number in range(4):
            kinds = [e.WhichOneof("event") for _, call, e in router.events() if call == number]
            assert kinds == ["reserved", *["tokens"] * 12, "done"]
        await worker.wait_idle()


async def test_a_call_that_comes_before_its_stream_waits_for_it(stub: StubWorker) -> None:
    async with router_of(stub.record.address) as router:
        calling = asyncio.create_task(router.generate(1))
        await until(lambda: stub.counters.calls == 1)
        router.open()
        assert await calling == []
        await until(lambda: any(e.HasField("done") for _, _, e in router.events()))


async def test_a_call_whose_stream_never_opens_is_refused_and_leaves_nothing(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "OPENING_S", 0.05)
    async with run_decode(tiny_llama) as worker, router_of(worker.address) as router:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.generate(1)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "reply_to.stream was not opened" in (refused.value.details() or "")
        await worker.wait_idle()


@pytest.mark.parametrize("length", [0, 15, 65])
async def test_a_name_that_is_no_secret_is_refused(stub: StubWorker, length: int) -> None:
    async with router_of(stub.record.address) as router:
        router.name = b"x" * length
        router.open()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.opened()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "stream must be 16 to 64 bytes" in (refused.value.details() or "")


async def test_nobody_takes_over_the_stream_of_another(stub: StubWorker) -> None:
    async with router_of(stub.record.address) as router, router_of(stub.record.address) as other:
        router.open()
        await until(lambda: len(stub.replies) == 1)
        other.name = router.name
        other.open()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await other.opened()
        assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert await router.generate(1) == []


async def test_a_worker_that_leaves_says_first_what_there_is_to_say(stub: StubWorker) -> None:
    async with router_of(stub.record.address) as router:
        router.open()
        await router.generate(1, max_tokens=5)
        stub.replies.close()
        await router.opened()
        assert [e.WhichOneof("event") for _, _, e in router.events()][-1] == "done"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            router.open()
            await router.opened()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_router_has_one_stream_per_worker_and_leaves_none(model: TextModel) -> None:
    async with running_gateway(model, scripted(TEXT)) as gateway:
        for _ in range(2):
            asked = [gateway.events(COMPLETIONS, ASKED) for _ in range(8)]
            for events in await asyncio.gather(*asked):
                assert joined(events) == (WHOLE, ["length"])
        workers = gateway.cluster.workers
        assert [len(worker.replies) for worker in workers] == [1, 1]
        await gateway.gateway.channels.close()
        await until(lambda: not any(len(worker.replies) for worker in workers))


async def test_a_stream_that_ends_under_its_calls_costs_no_token(model: TextModel) -> None:
    """The calls live, but nothing comes of them: they count as lost, and go on elsewhere."""
    async with running_gateway(model, scripted(TEXT), decodes=2) as gateway:
        for worker in gateway.cluster.decodes:
            worker.behaviour.step_s = 0.005
        events: list[Any] = []
        async with gateway.client.stream(
            "POST", COMPLETIONS, json={**ASKED, "stream": True}
        ) as response:
            async for event in sse_events(response):
                events.append(event)
                if len(events) == 5:
                    (busy,) = [w for w in gateway.cluster.decodes if w.counters.running]
                    busy.replies.close()
        assert joined(events) == (WHOLE, ["length"])
        await until(lambda: gateway.cluster.running == 0)


async def test_after_a_restart_of_the_worker_there_is_a_new_stream(model: TextModel) -> None:
    async with running_gateway(model, scripted(TEXT)) as gateway:
        (worker,) = gateway.cluster.decodes
        for _ in range(3):
            assert joined(await gateway.events(COMPLETIONS, ASKED)) == (WHOLE, ["length"])
            worker.replies.close()
            await until(lambda: len(worker.replies) == 0)
            worker.replies = replies.ReplyStreams()
            # The router may not have heard of the end yet: it says so by suspecting the worker.
            gateway.cluster.directory.put(worker.record)


async def test_a_worker_that_has_no_streams_answers_by_its_calls(model: TextModel) -> None:
    async with running_gateway(model, scripted(TEXT), streams_replies=False) as gateway:
        assert joined(await gateway.events(COMPLETIONS, ASKED)) == (WHOLE, ["length"])
        for worker in gateway.cluster.workers:
            assert not worker.counters.requests[-1].HasField("reply_to")
            assert len(worker.replies) == 0


async def test_an_answer_whose_call_ends_without_its_last_event_goes_on_elsewhere(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker says that all is well, and nothing more comes."""
    monkeypatch.setattr("router.replies.LAST_EVENTS_S", 0.1)
    async with running_gateway(model, scripted(TEXT), decodes=2) as gateway:
        for decode in gateway.cluster.decodes:
            decode.behaviour.end_early_at = 5
            monkeypatch.setattr(decode.replies, "answers", without_done(decode))
        first = asyncio.create_task(gateway.events(COMPLETIONS, ASKED))
        await until(lambda: any(w.counters.completed for w in gateway.cluster.decodes))
        for decode in gateway.cluster.decodes:
            decode.behaviour.end_early_at = None
        async with asyncio.timeout(10):
            assert joined(await first) == (WHOLE, ["length"])


def without_done(worker: StubWorker) -> Any:
    answers = worker.replies.answers

    async def dropping(request: Any, context: Any) -> replies.Write:
        answer = await answers(request, context)

        async def write(event: Any) -> None:
            if not event.HasField("done"):
                await answer(event)

        return write

    return dropping


async def test_who_leaves_in_the_middle_is_forgotten(gateway: RunningGateway) -> None:
    """What the worker says until it hears of that is for nobody."""
    (decode,) = gateway.cluster.decodes
    decode.behaviour.step_s = 0.005
    async with gateway.client.stream(
        "POST", COMPLETIONS, json={**ASKED, "max_tokens": 400, "stream": True}
    ) as response:
        await anext(sse_events(response))
    await until(lambda: gateway.cluster.running == 0)
    assert decode.counters.cancelled == 1
    assert joined(await gateway.events(COMPLETIONS, ASKED)) == (WHOLE, ["length"])


@pytest.fixture
async def gateway(model: TextModel) -> AsyncIterator[RunningGateway]:
    async with running_gateway(model, scripted(TEXT)) as running:
        yield running
