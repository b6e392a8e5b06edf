"""Free space, hashing and copying of files. Knows nothing of models."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from baton.store.errors import StoreError

Advance = Callable[[int], None]
FreeSpace = Callable[[Path], int]

_CHUNK = 1 << 22
MARGIN_BYTES = 32 << 20
"""Room left for the small files and for whoever else writes to the disk meanwhile."""


def free_space(path: Path) -> int:
    """Bytes that this user may still write where `path` is."""
    return shutil.disk_usage(path).free


def require_space(needed: int, path: Path, free: FreeSpace) -> None:
    available = free(path)
    if needed + MARGIN_BYTES > available:
        raise StoreError(
            f"The model needs {_mib(needed + MARGIN_BYTES)} in {path}, where only "
            f"{_mib(available)} are free; free some space or set BATON_HOME to a larger disk."
        )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


def sha256_file(path: Path, advance: Advance = lambda _: None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link where the file system allows it: weights then cost no space."""
    source = source.resolve()
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def sync(path: Path) -> None:
    """Make a file or the names in a directory outlive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
