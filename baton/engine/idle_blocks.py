"""Cached blocks that nobody holds, in the order in which they are given up: those that no pin
covers, the longest unused first; then, when nothing else is left, pinned ones. A pin so never keeps
a running sequence from its next block.
"""

from collections import OrderedDict
from collections.abc import Iterator


class IdleBlocks:
    def __init__(self) -> None:
        self._loose: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._pinned: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._loose) + len(self._pinned)

    def __iter__(self) -> Iterator[int]:
        yield from self._loose
        yield from self._pinned

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    def add(self, block: int, pinned: bool) -> None:
        (self._pinned if pinned else self._loose)[block] = None

    def remove(self, block: int) -> None:
        del (self._pinned if block in self._pinned else self._loose)[block]

    def pop(self) -> tuple[int, bool]:
        """The block to give up, and whether it was pinned."""
        pinned = not self._loose
        block, _ = (self._pinned if pinned else self._loose).popitem(last=False)
        return block, pinned

    def move(self, block: int, pinned: bool) -> None:
        """If it is idle; what loses its pin counts as just used."""
        if block in self._loose or block in self._pinned:
            self.remove(block)
            self.add(block, pinned)

    def clear(self) -> None:
        self._loose.clear()
        self._pinned.clear()
