"""Which block holds which tokens: the hashes of full, computed blocks, both ways.

Plain bookkeeping for the block manager; knows nothing of who holds a block. `events` hears of every
block that becomes findable or ceases to be.
"""

from collections.abc import Iterable

from baton.engine.block_events import BlockEvents
from baton.engine.sequence import NO_BLOCK


class PrefixTable:
    def __init__(self) -> None:
        self.events: BlockEvents | None = None
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._parent_of: dict[bytes, bytes] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._block_of

    def find(self, digest: bytes) -> int:
        """Its block, or NO_BLOCK."""
        return self._block_of.get(digest, NO_BLOCK)

    def hash_of(self, block: int) -> bytes | None:
        return self._hash_of.get(block)

    def leading(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix."""
        blocks: list[int] = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def entries(self) -> list[tuple[bytes, bytes]]:
        """Hash and parent of every block, oldest first."""
        return list(self._parent_of.items())

    def blocks(self) -> list[int]:
        return list(self._hash_of)

    def add(self, block: int, digest: bytes, parent: bytes) -> None:
        """The first block with a hash keeps it."""
        if digest in self._block_of:
            return
        self._block_of[digest] = block
        self._hash_of[block] = digest
        self._parent_of[digest] = parent
        self._tell(True, digest, parent)

    def remove(self, block: int) -> None:
        digest = self._hash_of.pop(block)
        del self._block_of[digest]
        self._tell(False, digest, self._parent_of.pop(digest))

    def check_integrity(self) -> None:
        """Raises RuntimeError when the maps disagree."""
        if {d: b for b, d in self._hash_of.items()} != self._block_of:
            raise RuntimeError("hash index and blocks disagree")
        if self._parent_of.keys() != self._block_of.keys():
            raise RuntimeError("hash index and parents disagree")

    def _tell(self, stored: bool, digest: bytes, parent: bytes) -> None:
        if self.events is not None:
            self.events.append((stored, digest, parent))
