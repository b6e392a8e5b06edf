"""One streaming call to one worker: reads events, and says who failed and how.

Owns the mapping of gRPC statuses to the reactions of the conductor: full, rejected, faulty.
What a worker says about its own fault stays in the log; clients get a plain sentence.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from baton.cluster.errors import BatonError, Overloaded, WorkerUnavailable
from baton.cluster.ledger import CallTrail
from baton.cluster.once import Once
from baton.cluster.rpc import error_from_rpc, refusal
from baton.cluster.workers import WorkerRecord
from router.notes import note
from router.replies import DirectCall, StreamedCall

_log = logging.getLogger(__name__)
LATE_S = 0.05
"""An event loop that wakes later than that has much to do."""


class WorkerFull(Overloaded):
    """The worker has no room now."""

    def __init__(self, worker: WorkerRecord) -> None:
        super().__init__(f"{worker.worker_id} has no room.", retry_after_s=1.0)
        self.worker = worker


class WorkerFault(WorkerUnavailable):
    """The worker failed. `unreachable`: it is likely to fail others in the same way.
    `lost_peer`: it says that it is the other worker of the pair that cannot be reached."""

    def __init__(
        self, worker: WorkerRecord, reason: str, unreachable: bool, lost_peer: bool = False
    ) -> None:
        super().__init__(f"A {worker.role} worker failed.", retry_after_s=1.0)
        self.worker = worker
        self.reason = reason
        self.unreachable = unreachable
        self.lost_peer = lost_peer


class WorkerContradiction(WorkerFault):
    """What it sent does not continue what the client has: nothing of the attempt can be kept."""


class WorkerCall:
    """A server-streaming RPC; `cancel` may be called at any time, any number of times."""

    def __init__(
        self,
        worker: WorkerRecord,
        call: DirectCall | StreamedCall,
        trail: CallTrail,
        heard: Callable[[str | None, Any], None],
        refusals: Once,
    ) -> None:
        """`heard` gets the kind of every event and the event as soon as it comes. `refusals`: what
        has been told of workers that cannot prove who they are, or do not believe who we are."""
        self.worker = worker
        self._call = call
        self._trail = trail
        self._heard = heard
        self._refusals = refusals
        self._ahead: asyncio.Task[Any] | None = None
        self._asked_at: float | None = None
        """Since when an event is awaited, on the monotonic clock."""
        self._over = False
        """Whether its last event has come."""

    def read(self) -> Awaitable[Any]:
        """The next event, None at the end of the stream."""
        ahead, self._ahead = self._ahead, None
        return ahead or self._read()

    def ahead(self) -> "asyncio.Task[Any]":
        """The next event, on its way; `read` gives it. For whoever waits for one of two calls."""
        if self._ahead is None:
            self._ahead = asyncio.create_task(self._read())
            self._ahead.add_done_callback(_seen)
        return self._ahead

    async def _read(self) -> Any:
        self._asked_at = time.monotonic()
        try:
            heard = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._reaction(error) from error
        self._asked_at = None
        if heard is grpc.aio.EOF:
            return None
        event, raw = heard
        kind = event.WhichOneof("event")
        self._over = kind == "done"
        note(kind, event, raw, self._trail, time.monotonic())
        self._heard(kind, event)
        return event

    async def read_within(self, seconds: float) -> Any:
        """As `read`. A worker that is silent for longer counts as unreachable. How late this
        process is itself does not count: what it waits for may have come and lie unread."""
        ahead, loop, left_s = self.ahead(), asyncio.get_running_loop(), seconds
        while not ahead.done() and left_s > 0:
            until = loop.time() + left_s
            await asyncio.wait({ahead}, timeout=left_s)
            late_s = loop.time() - until
            left_s = late_s if late_s > LATE_S else 0.0
        if not ahead.done():
            raise self.silence(seconds)
        return await self.read()

    def silence(self, seconds: float) -> WorkerFault:
        return self.fault(f"no answer within {seconds:g} s", unreachable=True)

    @asynccontextmanager
    async def watched(self, seconds: float) -> AsyncIterator[None]:
        """Inside, a worker whose next event somebody awaits for longer counts as unreachable. Costs
        a timer now and then, nothing per event."""
        loop, timer = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
        since = time.monotonic()

        def look() -> None:
            left_s = seconds
            if self._asked_at is not None:
                left_s -= time.monotonic() - max(self._asked_at, since)
            if left_s <= 0:
                silence.reschedule(loop.time())
            else:
                timer[:] = [loop.call_later(left_s, look)]

        try:
            async with asyncio.timeout(None) as silence:
                look()
                try:
                    yield
                finally:
                    timer[0].cancel()
        except TimeoutError:
            if not silence.expired():
                raise
            raise self.silence(seconds) from None

    def cancel(self) -> None:
        """A call whose last event has come ends by itself, or at its deadline."""
        if self._over:
            self._call.let_end()
        else:
            self._call.cancel()

    def fault(self, reason: str, unreachable: bool = False, lost_peer: bool = False) -> WorkerFault:
        _log.warning("worker %s failed: %s", self.worker.worker_id, reason)
        return WorkerFault(self.worker, reason, unreachable, lost_peer)

    def contradiction(self, reason: str) -> WorkerFault:
        _log.error("worker %s contradicts: %s", self.worker.worker_id, reason)
        return WorkerContradiction(self.worker, reason, unreachable=False)

    def _tell_refusal(self, reason: str) -> None:
        worker = self.worker
        if self._refusals.first((worker.worker_id, worker.incarnation, reason), time.monotonic()):
            _log.warning("worker %s at %s: %s", worker.worker_id, worker.address, reason)

    def _reaction(self, error: grpc.aio.AioRpcError) -> BatonError:
        reaction = error_from_rpc(error, self.worker.worker_id)
        if isinstance(reaction, Overloaded):
            return WorkerFull(self.worker)
        if isinstance(reaction, WorkerUnavailable):
            if (reason := refusal(error)) is not None:
                self._tell_refusal(reason)
                return WorkerFault(self.worker, reason, unreachable=True)
            code = error.code()
            unreachable = code is grpc.StatusCode.UNAVAILABLE
            return self.fault(str(reaction), unreachable, code is grpc.StatusCode.ABORTED)
        return reaction


def _seen(ahead: "asyncio.Task[Any]") -> None:
    """A failure that nobody reads any more is no loose end."""
    if not ahead.cancelled():
        ahead.exception()
