"""What becomes of a worker's shared blocks, for whoever publishes it.

The engine appends under its lock and never waits; one reader drains from another thread. The
buffer is bounded: when the reader is too slow events are lost, and it is told so, as it is told at
first: then it asks for all blocks.
"""

from collections import deque
from collections.abc import Callable

BlockEvent = tuple[bool, bytes, bytes]
"""Stored (or removed), the block's hash, its parent's hash (empty: a first block)."""


class BlockEvents:
    """`on_news` is called by the engine when the buffer was empty: it must not block."""

    def __init__(self, limit: int, on_news: Callable[[], None]) -> None:
        self._limit = limit
        self._on_news = on_news
        self._events: deque[BlockEvent] = deque()
        self._lost = True  # what came before the reader

    def append(self, event: BlockEvent) -> None:
        if len(self._events) >= self._limit:
            self._lost = True
            return
        self._events.append(event)
        if len(self._events) == 1:
            self._on_news()

    def drain(self) -> list[BlockEvent] | None:
        """What happened since the last call, in order; None when some of it was lost."""
        if self._lost:
            self._lost = False
            self._events.clear()
            return None
        drained = []
        while self._events:  # one by one: each step is atomic, while the engine goes on appending
            drained.append(self._events.popleft())
        return drained
