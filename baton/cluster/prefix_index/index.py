"""The router's side of the prefix index: who holds how much of a prompt, and who will soon.

A look-up is one round trip for all workers and never fails: without Redis it is a guess by
rendezvous hashing. What a routed request will create is noted in the background.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Sequence

from baton.block_hash import common_blocks
from baton.cluster.background import background
from baton.cluster.errors import RegistryUnavailable
from baton.cluster.prefix_index.matches import PrefixMatches, WorkerKey, key_of
from baton.cluster.prefix_index.notes import Note, Notes
from baton.cluster.prefix_index.prompt_blocks import PromptBlocks
from baton.cluster.prefix_index.store import PrefixStore, parse_leading
from baton.cluster.redis_link import RedisLink
from baton.cluster.workers import KVLayout, WorkerRecord

LOOKUP_TIMEOUT_S = 0.03
EXPECT_TIMEOUT_S = 0.5

_Group = tuple[Sequence[bytes], list[WorkerKey]]


class PrefixIndex:
    """`start` inside a running event loop. The link stays its maker's."""

    def __init__(
        self, link: RedisLink, store: PrefixStore, lookup_timeout_s: float = LOOKUP_TIMEOUT_S
    ) -> None:
        self._link = link
        self._store = store
        self._lookup_timeout_s = lookup_timeout_s
        self._notes = Notes()
        self._noted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        return self._link.healthy

    async def lookup(self, prompt: PromptBlocks, workers: Sequence[WorkerRecord]) -> PrefixMatches:
        """What the workers hold, and are about to hold, of a prompt; never raises."""
        groups = _group(prompt, workers)
        if not groups:
            return PrefixMatches(available=self.healthy)
        told = self._notes.told
        try:
            found: bytes = await self._link.call(
                lambda: self._store.leading(groups), self._lookup_timeout_s
            )
        except RegistryUnavailable:
            return PrefixMatches.guessed(prompt, workers)
        hashes_of = {key: hashes for hashes, keys in groups for key in keys}
        pairs = list(zip(hashes_of, parse_leading(found), strict=True))
        held = {key: held for key, (held, _) in pairs if held}
        coming = {key: coming for key, (_, coming) in pairs if coming}
        for note in self._notes.unknown(told):
            if shared := common_blocks(hashes_of.get(note.worker, ()), note.hashes):
                coming[note.worker] = max(shared, coming.get(note.worker, 0))
        if prompt.cache_key and not held and not coming:
            # As much as makes the difference between workers that are otherwise alike.
            coming = dict.fromkeys(PrefixMatches.guessed(prompt, workers).coming, 1)
        return PrefixMatches(held=held, coming=coming)

    @contextlib.contextmanager
    def expecting(self, prompt: PromptBlocks, workers: Iterable[WorkerRecord]) -> Iterator[None]:
        """A request is routed to `workers`: its prompt's blocks count there from now on, for a
        while, whether or not they come; not any more when an exception ends the context. When many
        wait to be sent the oldest are forgotten."""
        chains = [(worker, prompt.hashes(worker.layout)) for worker in workers]
        notes = [Note(key_of(w), w.num_blocks, h) for w, h in chains if h]
        with self._notes.proposed(notes):
            yield
        if notes:
            self._noted.set()

    async def start(self) -> None:
        self._task = background(self._send(), name="prefix-expect")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _send(self) -> None:
        while True:
            await self._noted.wait()
            self._noted.clear()
            notes, given = self._notes.since(self._notes.told), self._notes.given
            with contextlib.suppress(RegistryUnavailable):  # only a prediction: nobody misses it
                await self._link.call(lambda n=notes: self._store.expect(n), EXPECT_TIMEOUT_S)  # type: ignore[misc]
            self._notes.told = given


def _group(prompt: PromptBlocks, workers: Sequence[WorkerRecord]) -> list[_Group]:
    """Workers by the hashes that the prompt has on them."""
    by_layout: dict[tuple[str, str, int], tuple[KVLayout, list[WorkerKey]]] = {}
    for worker in workers:
        layout = worker.layout
        key = (layout.fingerprint, layout.dtype, layout.block_size)
        by_layout.setdefault(key, (layout, []))[1].append(key_of(worker))
    groups = [(prompt.reusable_hashes(layout), keys) for layout, keys in by_layout.values()]
    return [(hashes, keys) for hashes, keys in groups if hashes]
