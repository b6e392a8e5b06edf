"""One streaming call to one worker: reads events, and says who failed and how.

Owns the mapping of gRPC statuses to the reactions of the conductor: full, rejected, faulty.
What a worker says about its own fault stays in the log; clients get a plain sentence.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from baton.cluster.errors import BatonError, Overloaded, WorkerUnavailable
from baton.cluster.rpc import error_from_rpc
from baton.cluster.workers import WorkerRecord

_log = logging.getLogger(__name__)


class WorkerFull(Overloaded):
    """The worker has no room now."""

    def __init__(self, worker: WorkerRecord) -> None:
        super().__init__(f"{worker.worker_id} has no room.", retry_after_s=1.0)
        self.worker = worker


class WorkerFault(WorkerUnavailable):
    """The worker failed. `unreachable`: it is likely to fail others in the same way."""

    def __init__(self, worker: WorkerRecord, reason: str, unreachable: bool) -> None:
        super().__init__(f"A {worker.role} worker failed.", retry_after_s=1.0)
        self.worker = worker
        self.reason = reason
        self.unreachable = unreachable


class WorkerCall:
    """A server-streaming RPC; `cancel` may be called at any time, any number of times."""

    def __init__(self, worker: WorkerRecord, call: Any) -> None:
        self.worker = worker
        self._call = call

    async def read(self) -> Any:
        """The next event, None at the end of the stream."""
        try:
            event = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._reaction(error) from error
        return None if event is grpc.aio.EOF else event

    async def failure(self) -> BatonError | None:
        """How the call has failed already, without waiting for anything."""
        if not self._call.done() or await self._call.code() is grpc.StatusCode.OK:
            return None
        return self.fault(f"{await self._call.code()}: {await self._call.details()}", True)

    @asynccontextmanager
    async def answers_within(self, seconds: float) -> AsyncIterator[None]:
        """A worker that is silent for longer counts as unreachable."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            raise self.fault(f"no answer within {seconds:g} s", True) from error

    def cancel(self) -> None:
        self._call.cancel()

    def fault(self, reason: str, unreachable: bool = False) -> WorkerFault:
        _log.warning("worker %s failed: %s", self.worker.worker_id, reason)
        return WorkerFault(self.worker, reason, unreachable)

    def _reaction(self, error: grpc.aio.AioRpcError) -> BatonError:
        reaction = error_from_rpc(error, self.worker.worker_id)
        if isinstance(reaction, Overloaded):
            return WorkerFull(self.worker)
        if isinstance(reaction, WorkerUnavailable):
            return self.fault(str(reaction), error.code() is grpc.StatusCode.UNAVAILABLE)
        return reaction
