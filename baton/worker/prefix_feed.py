"""From the engine's block events to the prefix index: the bridge between engine and cluster."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

from baton.cluster.prefix_index import PrefixPublisher, PrefixStore
from baton.cluster.redis_client import close, connect
from baton.engine.block_events import BlockEvent, BlockEvents
from baton.engine.engine import Engine
from baton.worker.status import WorkerStatus

MIN_EVENTS = 1 << 16


class EngineBlocks:
    """The publisher's source: the shared blocks of one engine. `on_news`: see BlockEvents."""

    def __init__(self, engine: Engine, events: BlockEvents) -> None:
        self._engine = engine
        self._events = events

    def drain(self) -> list[BlockEvent] | None:
        return self._events.drain()

    def snapshot(self) -> list[tuple[bytes, bytes]]:
        return self._engine.apply(self._engine.blocks.published)


@contextlib.asynccontextmanager
async def published_prefixes(status: WorkerStatus) -> AsyncIterator[None]:
    """While open, the worker's cached blocks stand in the index."""
    engine, settings = status.parts.engine, status.settings
    if not settings.enable_prefix_cache:
        yield
        return
    loop, client = asyncio.get_running_loop(), connect(settings.redis_url)

    def on_news() -> None:
        loop.call_soon_threadsafe(publisher.news)

    events = BlockEvents(max(MIN_EVENTS, 4 * engine.blocks.num_blocks), on_news)
    key = (settings.worker_id, status.incarnation)
    publisher = PrefixPublisher(PrefixStore(client), EngineBlocks(engine, events), key)
    engine.apply(partial(engine.blocks.report_to, events))
    await publisher.start()
    try:
        yield
    finally:
        engine.apply(partial(engine.blocks.report_to, None))
        await publisher.stop()
        await close(client)
