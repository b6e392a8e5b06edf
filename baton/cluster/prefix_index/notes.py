"""The prompts that this router has routed lately, which an answer of Redis may not know yet.

A note takes a moment to reach Redis, and an answer on its way is older still; of many equal
prompts at once each would be placed as if it were the first. So a look-up adds the notes that
Redis had not confirmed when the question left. Bounded; no I/O and no clock.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from baton.cluster.prefix_index.matches import WorkerKey

MAX_NOTES = 256


class Note(NamedTuple):
    """`worker` will hold the blocks of these hashes; it holds `limit` blocks at most."""

    worker: WorkerKey
    limit: int
    hashes: Sequence[bytes]


class Notes:
    """Numbered in order from 0; the oldest are forgotten. `given`: how many there were. `told`:
    Redis knows of those before this number."""

    def __init__(self, limit: int = MAX_NOTES) -> None:
        self.given = 0
        self.told = 0
        self._given: deque[Note] = deque(maxlen=limit)
        self._proposed: dict[int, Sequence[Note]] = {}

    @contextmanager
    def proposed(self, notes: Sequence[Note]) -> Iterator[None]:
        """They count meanwhile, and are given at the end, unless an exception is the end."""
        self._proposed[id(notes)] = notes
        try:
            yield
            self._given += notes
            self.given += len(notes)
        finally:
            del self._proposed[id(notes)]

    def since(self, number: int) -> list[Note]:
        """Those given from this number on that are still kept."""
        first = len(self._given) - (self.given - number)
        return [self._given[place] for place in range(max(first, 0), len(self._given))]

    def unknown(self, told: int) -> Iterator[Note]:
        """To whoever asked Redis when it had been told of so many."""
        yield from self.since(told)
        for notes in self._proposed.values():
            yield from notes
