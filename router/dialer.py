"""The calls to workers: what a leg of a request says to each of them. Knows no order of calls."""

import asyncio
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, Self

import grpc.aio

from baton.cluster.once import Once
from baton.cluster.rpc import ChannelPool
from baton.cluster.workers import WorkerRecord
from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2
from router.calls import WorkerCall
from router.hold import Hold
from router.job import Leg
from router.notes import read_tokens
from router.placement import Plan
from router.replies import DirectCall, Method, Replies

STOP_TIMEOUT_S = 1.0


GENERATE = Method(
    "/baton.v1.Decode/Generate", lambda raw: (decode_pb2.GenerateEvent.FromString(raw), raw)
)
PREFILL = Method(
    "/baton.v1.Prefill/Prefill", lambda raw: (prefill_pb2.PrefillEvent.FromString(raw), raw)
)


class Dialer:
    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels
        self._replies = Replies()
        self._refusals = Once()

    def decode(self, leg: Leg, worker: WorkerRecord, hold: Hold) -> WorkerCall:
        request = decode_pb2.GenerateRequest(
            request_id=leg.job.request_id,
            prompt_token_ids=leg.job.prompt_token_ids,
            sampling=leg.sampling,
            cache_salt=leg.job.cache_salt,
            kv_policy=str(leg.job.kv_policy),
            prefill_here=hold.plan.prefill is None,
            max_uncached_tokens=max_uncached(leg, hold.plan),
            continuation=leg.continuation,
            deadline_s=leg.first_token_within_s,
            pins=leg.pins,
        )
        return self._call(leg, worker, GENERATE, request, hold)

    def prefill(
        self,
        leg: Leg,
        worker: WorkerRecord,
        destination: common_pb2.Reservation | None,
        hold: Hold,
    ) -> WorkerCall:
        request = prefill_pb2.PrefillRequest(
            request_id=leg.job.request_id,
            prompt_token_ids=leg.job.prompt_token_ids,
            sampling=leg.sampling,
            destination=destination,
            cache_salt=leg.job.cache_salt,
            kv_policy=str(leg.job.kv_policy),
            continuation=leg.continuation,
            deadline_s=leg.first_token_within_s,
            pins=leg.pins,
        )
        return self._call(leg, worker, PREFILL, request, hold)

    def _call(
        self, leg: Leg, worker: WorkerRecord, method: Method, request: Any, hold: Hold
    ) -> WorkerCall:
        attempt = len(leg.failures) + 1
        trail = leg.job.trail.call(
            worker.worker_id, worker.role, time.monotonic(), attempt, read_tokens
        )
        channel, timeout_s = self._channels.get(worker.address), leg.job.time_left()
        call = (
            self._replies.call(channel, worker.address, method, request, timeout_s)
            if worker.streams_replies
            else DirectCall(channel, method, request, timeout_s)
        )
        return WorkerCall(worker, call, trail, hold.heard, self._refusals)

    async def stop_choice(
        self, worker: WorkerRecord, reservation: common_pb2.Reservation, choice: int
    ) -> None:
        stub = decode_pb2_grpc.DecodeStub(self._channels.get(worker.address))
        request = decode_pb2.StopChoiceRequest(
            reservation_id=reservation.id, secret=reservation.secret, choice=choice
        )
        try:
            await stub.StopChoice(request, timeout=STOP_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return  # its further tokens are dropped here; the main call shows any real fault


class Stops:
    """Tells a worker which choices are over, beside the stream of the others. A context: what has
    not been told at its end need not be."""

    def __init__(
        self, dialer: Dialer, worker: WorkerRecord, reservation: common_pb2.Reservation
    ) -> None:
        self._stop = partial(dialer.stop_choice, worker, reservation)
        self._telling: dict[int, asyncio.Task[None]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for telling in self._telling.values():
            telling.cancel()

    def tell(self, choices: Iterable[int]) -> None:
        """Each once."""
        for choice in choices:
            if choice not in self._telling:
                self._telling[choice] = asyncio.create_task(self._stop(choice))


def max_uncached(leg: Leg, plan: Plan) -> int | None:
    """Of a plan that counts on a cached prefix where somebody else could serve too: a step more
    than it says, once in a turn."""
    decode, other = plan.decode, plan.other and plan.other.decode
    if leg.turn.full or leg.turn.guessed or plan.prefill or not plan.cost.cached_tokens:
        return None
    if decode is None or other is None:
        return None
    if other.worker_id == decode.worker_id:
        return None  # nobody else could
    return plan.cost.uncached_tokens + decode.chunk_size
