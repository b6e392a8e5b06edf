"""Prefill and decode workers without a model: real gRPC servers that play a script.

Owns the three services of the wire contract, counters of everything that happened, and knobs
for delays, failures and lack of room. A hand-off is an event in memory, since no KV moves.
Tokens depend on (prompt, choice, position) only, as with a real worker.
"""

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import grpc
import grpc.aio

from baton.cluster.registry import RegistryState
from baton.cluster.rpc import make_server
from baton.cluster.workers import KVLayout, Role, WorkerLoad, WorkerRecord
from baton.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from baton.worker.replies import ReplyStreams, Write

LAYOUT = KVLayout("fingerprint-a", 2, 1, 8, 16, "float32")
Script = Callable[[Sequence[int], int], list[int]]


def scripted(text: str | bytes) -> Script:
    """Every choice says `text`, one token per byte, over and over."""
    token_ids = list(text.encode() if isinstance(text, str) else text)
    return lambda prompt, choice: token_ids


@dataclass
class Behaviour:
    """Knobs; change them at any time. `fail_at`: output position before which it fails;
    `fail_times`: how often, None for always; `fail_after_s`: so much later."""

    step_s: float = 0.0
    start_s: float = 0.0
    capacity: int = 1_000_000
    fail: grpc.StatusCode | None = None
    fail_at: int = 0
    fail_times: int | None = None
    fail_after_s: float = 0.0
    end_early_at: int | None = None
    num_cached_tokens: int = 0
    hang: bool = False
    says: bytes | None = None
    """Other tokens than the script's."""
    silent_after_commit: bool = False
    detail: str = "scripted failure"


@dataclass
class Counters:
    calls: int = 0
    refused: int = 0
    cancelled: int = 0
    completed: int = 0
    running: int = 0
    peak_running: int = 0
    tokens_sent: int = 0
    stopped: list[tuple[str, int]] = field(default_factory=list)
    requests: list[prefill_pb2.PrefillRequest | decode_pb2.GenerateRequest] = field(
        default_factory=list
    )


@dataclass
class Handoffs:
    """What prefill and decode stubs share in place of KV transfer."""

    landed: dict[str, asyncio.Event] = field(default_factory=dict)
    finished: dict[str, set[int]] = field(default_factory=dict)


def choices_of(
    request: prefill_pb2.PrefillRequest | decode_pb2.GenerateRequest,
) -> list[int]:
    """All choices of a request, or the one that goes on."""
    if request.HasField("continuation"):
        return [request.continuation.choice]
    return list(range(request.sampling.n))


class Writer:
    """Makes the tokens of a request from the script."""

    def __init__(
        self,
        script: Script,
        eos: int | None,
        prompt: Sequence[int],
        sampling: common_pb2.SamplingParams,
        choices: Sequence[int],
    ) -> None:
        self._outputs = {choice: script(prompt, choice) for choice in choices}
        self._eos = eos
        self._sampling = sampling

    def token(self, choice: int, index: int) -> common_pb2.Token:
        output = self._outputs[choice]
        last = index + 1 == self._sampling.max_tokens
        finish = common_pb2.FINISH_REASON_LENGTH if last else 0
        token_id = output[index % len(output)]
        if self._eos is not None and index == len(output):
            token_id, finish = self._eos, common_pb2.FINISH_REASON_STOP
        elif token_id in self._sampling.stop_token_ids:
            finish = common_pb2.FINISH_REASON_STOP
        token = common_pb2.Token(
            choice=choice, token_id=token_id, index=index, finish_reason=finish
        )
        if self._sampling.HasField("logprobs"):
            token.logprobs.logprob = -0.125 * (choice + 1)
            for k in range(self._sampling.logprobs):
                token.logprobs.top_token_ids.append((token_id + k) % 256)
                token.logprobs.top_logprobs.append(-0.125 - k)
        return token


class StubWorker:
    """What both roles share: a server, a record, counters and the knobs."""

    role: Role
    service: str

    def __init__(self, worker_id: str, cluster: "StubCluster") -> None:
        self.worker_id = worker_id
        self.cluster = cluster
        self.behaviour = Behaviour()
        self.counters = Counters()
        self.replies = ReplyStreams()
        self.record: WorkerRecord
        self.server: grpc.aio.Server

    async def start(self) -> None:
        servicers = [
            partial(worker_pb2_grpc.add_WorkerServicer_to_server, _WorkerServicer(self)),
            self._adder(),
        ]
        self.server, port = await make_server(servicers, "127.0.0.1:0", [self.service])
        await self.server.start()
        self.record = WorkerRecord(
            worker_id=self.worker_id,
            incarnation=f"{self.worker_id}-1",
            role=self.role,
            address=f"127.0.0.1:{port}",
            model="bytes",
            layout=LAYOUT,
            max_model_len=512,
            max_num_seqs=64,
            num_blocks=1000,
            load=WorkerLoad(free_blocks=1000),
            streams_replies=self.cluster.streams_replies,
        )

    async def kill(self) -> None:
        """Every call breaks, as when the process dies. The directory does not know yet."""
        await self.server.stop(None)

    def _adder(self) -> Callable[[grpc.aio.Server], None]:
        raise NotImplementedError

    async def _maybe_fail(self, context: grpc.aio.ServicerContext, index: int) -> None:
        behaviour = self.behaviour
        if behaviour.hang and index >= behaviour.fail_at:
            await asyncio.Event().wait()
        if behaviour.fail is not None and index >= behaviour.fail_at:
            if behaviour.fail_times is not None:
                if behaviour.fail_times == 0:
                    return
                behaviour.fail_times -= 1
            await asyncio.sleep(behaviour.fail_after_s)
            await context.abort(behaviour.fail, behaviour.detail)

    async def _enter(self, context: grpc.aio.ServicerContext, size: int) -> None:
        if self.counters.running + size > self.behaviour.capacity:
            self.counters.refused += 1
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
        self.counters.running += size
        self.counters.peak_running = max(self.counters.peak_running, self.counters.running)


class _WorkerServicer(worker_pb2_grpc.WorkerServicer):
    def __init__(self, worker: StubWorker) -> None:
        self._worker = worker

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WorkerInfo:
        record = self._worker.record
        role = worker_pb2.ROLE_PREFILL if record.role is Role.PREFILL else worker_pb2.ROLE_DECODE
        return worker_pb2.WorkerInfo(
            worker_id=record.worker_id,
            incarnation=record.incarnation,
            role=role,
            model=record.model,
            max_model_len=record.max_model_len,
            counters=worker_pb2.WorkerCounters(
                handoffs=self._worker.counters.completed,
                tokens_generated=self._worker.counters.tokens_sent,
            ),
        )

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.DrainResponse:
        return worker_pb2.DrainResponse(drained=self._worker.counters.running == 0)

    async def Replies(
        self, request: worker_pb2.RepliesRequest, context: grpc.aio.ServicerContext
    ) -> None:
        await self._worker.replies.serve(request.stream, context)


class StubPrefill(StubWorker, prefill_pb2_grpc.PrefillServicer):
    role = Role.PREFILL
    service = "baton.v1.Prefill"

    def _adder(self) -> Callable[[grpc.aio.Server], None]:
        return partial(prefill_pb2_grpc.add_PrefillServicer_to_server, self)

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> None:
        self.counters.calls += 1
        self.counters.requests.append(request)
        await self._enter(context, 1)
        try:
            await self._run(request, context)
            self.counters.completed += 1
        except asyncio.CancelledError:
            self.counters.cancelled += 1
            raise
        finally:
            self.counters.running -= 1

    async def _run(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> None:
        behaviour, answer = self.behaviour, await self.replies.answers(request, context)
        started = prefill_pb2.PrefillStarted(num_cached_tokens=behaviour.num_cached_tokens)
        await answer(prefill_pb2.PrefillEvent(started=started))
        await asyncio.sleep(behaviour.start_s)
        await self._maybe_fail(context, 0)
        writer = self.cluster.writer(request, behaviour.says)
        done = len(request.continuation.output_token_ids)
        tokens = [writer.token(choice, done) for choice in choices_of(request)]
        first = prefill_pb2.FirstTokens(tokens=tokens)
        await answer(prefill_pb2.PrefillEvent(first_tokens=first))
        self.counters.tokens_sent += len(tokens)
        await self._maybe_fail(context, 1)
        ended = {token.choice for token in tokens if token.finish_reason}
        finished = len(ended) == len(tokens)
        if request.HasField("destination") and not finished:
            handoffs = self.cluster.handoffs
            handoffs.finished[request.destination.id] = ended
            handoffs.landed[request.destination.id].set()
        if behaviour.silent_after_commit:
            await asyncio.Event().wait()
        closing = prefill_pb2.PrefillDone(
            num_computed_tokens=len(request.prompt_token_ids) - behaviour.num_cached_tokens,
            finished=finished,
        )
        await answer(prefill_pb2.PrefillEvent(done=closing))


class StubDecode(StubWorker, decode_pb2_grpc.DecodeServicer):
    role = Role.DECODE
    service = "baton.v1.Decode"

    def _adder(self) -> Callable[[grpc.aio.Server], None]:
        return partial(decode_pb2_grpc.add_DecodeServicer_to_server, self)

    async def Generate(
        self, request: decode_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        self.counters.calls += 1
        self.counters.requests.append(request)
        await self._enter(context, 1)
        reservation_id = f"{self.worker_id}/{next(self.cluster.reservations)}"
        try:
            await self._run(request, context, reservation_id)
            self.counters.completed += 1
        except asyncio.CancelledError:
            self.counters.cancelled += 1
            raise
        finally:
            self.counters.running -= 1
            self.cluster.handoffs.landed.pop(reservation_id, None)
            self.cluster.handoffs.finished.pop(reservation_id, None)

    async def StopChoice(
        self, request: decode_pb2.StopChoiceRequest, context: grpc.aio.ServicerContext
    ) -> decode_pb2.StopChoiceResponse:
        self.counters.stopped.append((request.reservation_id, request.choice))
        ended = self.cluster.handoffs.finished.get(request.reservation_id)
        if ended is None or request.choice in ended:
            return decode_pb2.StopChoiceResponse(stopped=False)
        ended.add(request.choice)
        return decode_pb2.StopChoiceResponse(stopped=True)

    async def _run(
        self,
        request: decode_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext,
        reservation_id: str,
    ) -> None:
        if self.behaviour.hang and self.behaviour.fail_at == 0:
            await asyncio.Event().wait()
        answer = await self.replies.answers(request, context)
        landed = self.cluster.handoffs.landed[reservation_id] = asyncio.Event()
        reservation = common_pb2.Reservation(
            id=reservation_id, generation=1, address=self.record.address, lease_s=30
        )
        reserved = decode_pb2.Reserved(reservation=reservation)
        await answer(decode_pb2.GenerateEvent(reserved=reserved))
        if request.prefill_here:
            self.cluster.handoffs.finished[reservation_id] = set()
        else:
            await landed.wait()
        await self._decode(request, context, answer, reservation_id)
        cached = self.behaviour.num_cached_tokens if request.prefill_here else 0
        done = decode_pb2.GenerateDone(num_cached_tokens=cached)
        await answer(decode_pb2.GenerateEvent(done=done))

    async def _decode(
        self,
        request: decode_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext,
        answer: Write,
        reservation_id: str,
    ) -> None:
        writer = self.cluster.writer(request)
        done = len(request.continuation.output_token_ids)
        ended = self.cluster.handoffs.finished[reservation_id]
        for index in itertools.count(done + (0 if request.prefill_here else 1)):
            alive = [c for c in choices_of(request) if c not in ended]
            if not alive or self.behaviour.end_early_at == index:
                return
            await asyncio.sleep(self.behaviour.step_s)
            await self._maybe_fail(context, index)
            tokens = [writer.token(choice, index) for choice in alive]
            ended |= {token.choice for token in tokens if token.finish_reason}
            event = decode_pb2.GenerateEvent(tokens=decode_pb2.Tokens(tokens=tokens))
            self.counters.tokens_sent += len(tokens)
            await answer(event)


class StubCluster:
    """Some prefill and decode stubs and the directory that knows them."""

    def __init__(
        self, script: Script, eos: int | None = None, streams_replies: bool = True
    ) -> None:
        self.script = script
        self.streams_replies = streams_replies
        self.eos = eos
        self.handoffs = Handoffs()
        self.reservations = itertools.count(1)
        self.directory = FakeDirectory()
        self.prefills: list[StubPrefill] = []
        self.decodes: list[StubDecode] = []

    def writer(
        self,
        request: prefill_pb2.PrefillRequest | decode_pb2.GenerateRequest,
        says: bytes | None = None,
    ) -> Writer:
        eos = None if request.sampling.ignore_eos else self.eos
        script = scripted(says) if says else self.script
        return Writer(script, eos, request.prompt_token_ids, request.sampling, choices_of(request))

    async def add_prefill(self) -> StubPrefill:
        worker = StubPrefill(f"prefill-{len(self.prefills)}", self)
        self.prefills.append(worker)
        await worker.start()
        self.directory.put(worker.record)
        return worker

    async def add_decode(self) -> StubDecode:
        worker = StubDecode(f"decode-{len(self.decodes)}", self)
        self.decodes.append(worker)
        await worker.start()
        self.directory.put(worker.record)
        return worker

    @property
    def workers(self) -> list[StubWorker]:
        return [*self.prefills, *self.decodes]

    @property
    def running(self) -> int:
        return sum(worker.counters.running for worker in self.workers)

    @property
    def calls(self) -> int:
        return sum(worker.counters.calls for worker in self.workers)

    async def stop(self) -> None:
        await asyncio.gather(*(worker.server.stop(None) for worker in self.workers))


class FakeDirectory:
    """The directory's interface over a list that tests change by hand."""

    def __init__(self) -> None:
        self.state = RegistryState.CONNECTED
        self.suspects: list[str] = []
        self.doubted = False
        self._records: dict[str, WorkerRecord] = {}
        self._changed = asyncio.Event()

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        return None

    def snapshot(self) -> tuple[WorkerRecord, ...]:
        return tuple(self._records.values())

    def suspect(self, worker_id: str, incarnation: str) -> None:
        self.suspects.append(worker_id)
        if self._records.get(worker_id, None) is not None:
            self.remove(worker_id)

    def put(self, record: WorkerRecord, **changes: object) -> None:
        changed = dataclasses.replace(record, **changes)  # type: ignore[arg-type]
        self._records[record.worker_id] = changed
        self._notify()

    def remove(self, worker_id: str) -> None:
        self._records.pop(worker_id, None)
        self._notify()

    async def wait_changed(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
