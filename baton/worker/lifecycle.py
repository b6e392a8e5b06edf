"""One life of a worker: listen, announce, run until told to leave, drain, leave.

First SIGTERM or SIGINT: stop taking work and finish what runs, within the drain deadline. A
second one: stop at once. A process that may have another role begins another life in it.
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from baton.cluster.errors import SettingsError
from baton.cluster.registry import Announcer, Registry
from baton.cluster.rpc import AddServicer, make_server
from baton.cluster.settings import fail
from baton.cluster.tls import TlsFolder
from baton.cluster.workers import Role
from baton.engine.async_engine import AsyncEngine, EngineFailed
from baton.v1 import worker_pb2_grpc
from baton.worker.exposition import exposed
from baton.worker.prefix_feed import published_prefixes
from baton.worker.replies import ReplyStreams
from baton.worker.role_change import RoleChange
from baton.worker.servicer import WorkerServicer
from baton.worker.status import WorkerStatus

T = TypeVar("T")

log = logging.getLogger(__name__)

STOP_GRACE_S = 1.0


class StopSignals:
    """Counts SIGTERM and SIGINT as two events, in order. `roles`: those that the process can have
    after one that is not told to stop."""

    def __init__(self, roles: Iterable[Role] = ()) -> None:
        self.roles = frozenset(roles)
        self.drain = asyncio.Event()
        self.now = asyncio.Event()

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request)

    def request(self) -> None:
        (self.now if self.drain.is_set() else self.drain).set()


def run_worker(
    boot: Callable[[], T],
    serve_parts: Callable[[T, StopSignals], Awaitable[object]],
    roles: Iterable[Role] = (),
) -> int:
    """Boots, then serves until stopped. 0 after an orderly stop, 1 when the engine has failed, 2
    when a setting is wrong."""

    async def run(parts: T) -> None:
        signals = StopSignals(roles)
        signals.install()
        await serve_parts(parts, signals)

    try:
        asyncio.run(run(boot()))
    except SettingsError as error:
        return fail(error)
    except EngineFailed:  # it has said why when it did
        return 1
    return 0


async def serve(
    status: WorkerStatus,
    engine: AsyncEngine,
    replies: ReplyStreams,
    servicers: Sequence[AddServicer],
    service_names: Sequence[str],
    signals: StopSignals,
    tls: TlsFolder | None = None,
) -> Role | None:
    """Runs one worker until a stop signal has been obeyed (None), or it is to go on in the role
    that is returned. An engine that fails is a stop signal, and raises EngineFailed then."""
    settings, change = status.settings, RoleChange(status, signals.roles, tls)
    own = WorkerServicer(status, change, replies)
    server, port = await make_server(
        [*servicers, partial(worker_pb2_grpc.add_WorkerServicer_to_server, own)],
        f"{settings.host}:{settings.port}",
        [*service_names, "baton.v1.Worker"],
        settings.peer_timeout_s,
        tls,
    )
    status.address = settings.advertised(port)
    registry = Registry(settings.redis_url)
    announcer = Announcer(registry, status.record)
    status.announce = announcer.announce_now
    engine.on_failed = signals.drain.set
    engine.start()
    await server.start()
    await announcer.start()
    log.info("ready role=%s id=%s address=%s", status.role, settings.worker_id, status.address)
    try:
        with exposed(status):
            async with published_prefixes(status):
                if not await change.due_before(signals.drain):
                    await _drain(status, signals)
    finally:
        # Leave the registry before the port closes, so that routers stop sending first.
        await announcer.stop()
        await registry.close()
        replies.close()  # they end with their routers only: stopping would wait for them
        await server.stop(STOP_GRACE_S)
        await engine.stop()
    log.info("stopped id=%s", settings.worker_id)
    if engine.failed:
        raise EngineFailed(f"the engine of {settings.worker_id} failed")
    return None if signals.drain.is_set() else change.role


async def _drain(status: WorkerStatus, signals: StopSignals) -> None:
    log.info("draining id=%s", status.settings.worker_id)
    status.activity.stop_taking()
    status.announce()
    drained = asyncio.create_task(status.activity.idle(status.settings.drain_timeout_s))
    stop_now = asyncio.create_task(signals.now.wait())
    await asyncio.wait({drained, stop_now}, return_when=asyncio.FIRST_COMPLETED)
    stop_now.cancel()
    if not drained.done():
        drained.cancel()
        log.warning("stopping at once id=%s", status.settings.worker_id)
    elif not drained.result():
        log.warning("the drain deadline passed; what still runs is cut off")
