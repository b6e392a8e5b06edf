"""The blocks of one worker that a prompt can find: those whose whole chain is there.

A cache may lose a block but keep a later one of the same chain. Such a block is no use to a
look-up until its ancestors are back, so it is hidden meanwhile. Invariant: the parent of every
visible block is visible, so one search by halves finds how much of a chain is there. Pure
bookkeeping, bounded by what the worker holds.
"""

from collections.abc import Iterable

Change = tuple[bool, bytes, bytes]
"""Stored (or removed), the block's hash, its parent's hash (empty: a first block)."""


class Reachable:
    """`added` and `removed` are the net changes of `visible` since `take_changes`."""

    def __init__(self, blocks: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self.visible: dict[bytes, None] = {}  # ordered: parents first
        self._parent_of: dict[bytes, bytes] = {}
        self._children: dict[bytes, set[bytes]] = {}
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self.apply((True, digest, parent) for digest, parent in blocks)

    def apply(self, changes: Iterable[Change]) -> None:
        """In the order in which they happened; repeating some does no harm."""
        for stored, digest, parent in changes:
            if stored:
                self._store(digest, parent)
            else:
                self._remove(digest)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Added, parents first; removed, children first."""
        added, removed = list(self._added), list(reversed(self._removed))
        self._added, self._removed = {}, {}
        return added, removed

    def _store(self, digest: bytes, parent: bytes) -> None:
        if digest in self._parent_of:
            return
        self._parent_of[digest] = parent
        self._children.setdefault(parent, set()).add(digest)
        if not parent or parent in self.visible:
            for found in self._descend(digest):
                self.visible[found] = None
                if found in self._removed:
                    del self._removed[found]
                else:
                    self._added[found] = None

    def _remove(self, digest: bytes) -> None:
        parent = self._parent_of.pop(digest, None)
        if parent is None:
            return
        if digest in self.visible:
            for found in self._descend(digest):
                del self.visible[found]
                if found in self._added:
                    del self._added[found]
                else:
                    self._removed[found] = None
        siblings = self._children[parent]
        siblings.discard(digest)
        if not siblings:
            del self._children[parent]

    def _descend(self, digest: bytes) -> list[bytes]:
        """The block and all stored ones after it, parents first."""
        found = [digest]
        for block in found:  # grows while it is walked
            found += self._children.get(block, ())
        return found
