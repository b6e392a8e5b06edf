"""A prefix index on a real Redis: scripted caches in place of workers."""

import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from baton.cluster.prefix_index import PrefixIndex, PrefixPublisher, PrefixStore, PromptBlocks
from baton.cluster.prefix_index.matches import key_of
from baton.cluster.prefix_index.reachable import Change
from baton.cluster.redis_client import Client, close, connect
from baton.cluster.redis_link import RedisLink
from baton.cluster.workers import WorkerRecord
from tests.support.redis import LAYOUT, make_record, until

BLOCK_SIZE = LAYOUT.block_size


def prompt_of(num_blocks: int, seed: int = 0, salt: str = "") -> PromptBlocks:
    """A prompt of so many full blocks and one more token."""
    return PromptBlocks([seed * 1_000_000 + n for n in range(num_blocks * BLOCK_SIZE + 1)], salt)


@dataclass
class ScriptedCache:
    """What a worker's cache would tell."""

    blocks: dict[bytes, bytes] = field(default_factory=dict)
    changes: list[Change] | None = None

    def store(self, hashes: Sequence[bytes]) -> None:
        for digest, parent in zip(hashes, [b"", *hashes], strict=False):
            self.blocks[digest] = parent
            if self.changes is not None:
                self.changes.append((True, digest, parent))

    def evict(self, hashes: Sequence[bytes]) -> None:
        for digest in hashes:
            parent = self.blocks.pop(digest)
            if self.changes is not None:
                self.changes.append((False, digest, parent))

    def lose_events(self) -> None:
        self.changes = None

    def drain(self) -> list[Change] | None:
        drained, self.changes = self.changes, []
        return drained

    def snapshot(self) -> list[tuple[bytes, bytes]]:
        return list(self.blocks.items())


@dataclass
class PublishingWorker:
    record: WorkerRecord
    cache: ScriptedCache
    publisher: PrefixPublisher

    def store(self, prompt: PromptBlocks, num_blocks: int | None = None) -> None:
        self.cache.store(prompt.hashes(self.record.layout)[:num_blocks])
        self.publisher.news()

    def evict(self, prompt: PromptBlocks, first: int) -> None:
        self.cache.evict(prompt.hashes(self.record.layout)[first:])
        self.publisher.news()


class IndexedCluster:
    """Workers that publish, and one router's index that looks up."""

    def __init__(self, url: str, period_s: int, lookup_timeout_s: float) -> None:
        self.url = url
        self.link = RedisLink(url)
        self.store = PrefixStore(self.link.client, period_s=period_s)
        self.index = PrefixIndex(self.link, self.store, lookup_timeout_s)
        self.workers: list[PublishingWorker] = []
        self._clients: list[Client] = []

    async def add(
        self, worker_id: str = "prefill-0", lease_s: float = 10.0, **record: object
    ) -> PublishingWorker:
        client = connect(self.url)
        self._clients.append(client)
        made = dataclasses.replace(make_record(worker_id), **record)  # type: ignore[arg-type]
        cache = ScriptedCache()
        publisher = PrefixPublisher(
            PrefixStore(client), cache, key_of(made), heartbeat_s=0.1, lease_s=lease_s
        )
        await publisher.start()
        self.workers.append(PublishingWorker(made, cache, publisher))
        return self.workers[-1]

    def route(self, prompt: PromptBlocks, worker: PublishingWorker) -> None:
        with self.index.expecting(prompt, [worker.record]):
            return

    async def held(self, prompt: PromptBlocks) -> list[int]:
        """Blocks by worker, in the order in which they were added."""
        records = [worker.record for worker in self.workers]
        matches = await self.index.lookup(prompt, records)
        return [matches.held_tokens(record) // BLOCK_SIZE for record in records]

    async def expected(self, prompt: PromptBlocks) -> list[int]:
        records = [worker.record for worker in self.workers]
        matches = await self.index.lookup(prompt, records)
        return [matches.expected_tokens(record) // BLOCK_SIZE for record in records]

    async def until_held(self, prompt: PromptBlocks, *counts: int) -> None:
        async def found() -> bool:
            return await self.held(prompt) == list(counts)

        await until(found)

    async def stop(self) -> None:
        await self.index.stop()
        for worker in self.workers:
            await worker.publisher.stop()
        for client in self._clients:
            await close(client)
        await self.link.close()


@contextlib.asynccontextmanager
async def indexed_cluster(
    url: str, period_s: int = 10, lookup_timeout_s: float = 2.0
) -> AsyncIterator[IndexedCluster]:
    """A look-up waits long: what it finds must not depend on how busy the machine is."""
    cluster = IndexedCluster(url, period_s, lookup_timeout_s)
    await cluster.link.start()
    await cluster.index.start()
    try:
        yield cluster
    finally:
        await cluster.stop()


def random_hashes(count: int) -> list[bytes]:
    return [os.urandom(16) for _ in range(count)]
