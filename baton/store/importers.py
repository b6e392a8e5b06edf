"""What the store asks of anything that can fill a model directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from baton.store.disk import Advance


class Importer(Protocol):
    """Checks its source when it is made; StoreError says what is wrong with it."""

    @property
    def work_bytes(self) -> int:
        """Total that `write` will report through `advance`."""

    def needed_bytes(self, target: Path) -> int:
        """Disk space that `write` will take on `target`'s file system."""

    def write(self, target: Path, advance: Advance) -> Mapping[str, str]:
        """Fill the empty directory `target`; returns the SHA-256 of files already hashed."""
