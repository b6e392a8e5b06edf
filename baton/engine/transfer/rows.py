"""Rows of a cache's planes copied, and hashed on the way: between the cache and a payload, or two
caches. One kernel where the CPU has it, which reads every byte once and writes into a cache past
the core's own caches; else numpy and xxhash, plane by plane.
"""

from collections.abc import Sequence as ListOf

import numpy as np
import xxhash

from baton.engine.ops.cpu.kernels import kernels

_STRIPE = 64
"""Bytes; what the kernel copies is a multiple of it."""
_LONG = 240
"""Bytes; XXH3 hashes what is no longer in other ways."""


def copy_rows(
    source: np.ndarray,
    source_rows: ListOf[int] | None,
    target: np.ndarray,
    target_rows: ListOf[int] | None,
    with_checksum: bool,
) -> int | None:
    """From (plane, row, byte) to (plane, row, byte), rows contiguous; None: all rows in order, as
    a payload has them. Returns the XXH3-64 of the copied rows, plane by plane. Raises ValueError
    for rows that do not exist."""
    theirs, mine = _checked(source, source_rows), _checked(target, target_rows)
    if len(theirs) != len(mine):
        raise ValueError(f"{len(theirs)} rows do not fit into {len(mine)}")
    kernel, total = kernels(), source.shape[0] * len(theirs) * source.shape[2]
    if kernel is None or total <= _LONG or source.shape[2] % _STRIPE:
        return _copy_rows(source, theirs, target, mine, with_checksum)
    aligned = target.ctypes.data % _STRIPE == 0 and target.strides[0] % _STRIPE == 0
    streamed = target_rows is not None and aligned
    digest = kernel.copy_rows(source, theirs, target, mine, with_checksum, streamed)
    return digest if with_checksum else None


def _checked(array: np.ndarray, rows: ListOf[int] | None) -> np.ndarray:
    if rows is None:
        return np.arange(array.shape[1], dtype=np.int64)
    ids = np.array(rows, dtype=np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() < array.shape[1]:
        raise ValueError(f"rows must be in [0, {array.shape[1]}): {list(rows)}")
    return ids


def _copy_rows(
    source: np.ndarray,
    theirs: np.ndarray,
    target: np.ndarray,
    mine: np.ndarray,
    with_checksum: bool,
) -> int | None:
    digest = xxhash.xxh3_64() if with_checksum else None
    into, out_of = _index(mine), _index(theirs)
    for number, plane in enumerate(source):
        if isinstance(into, slice):  # "clip" spares numpy a buffer, and the ids are checked
            rows = target[number, into]
            np.take(plane, theirs, axis=0, out=rows, mode="clip")
        else:
            rows = plane[out_of]
            target[number, into] = rows
        if digest is not None:
            digest.update(rows.data)
    return digest.intdigest() if digest is not None else None


def _index(rows: np.ndarray) -> slice | np.ndarray:
    """Of consecutive rows a slice, which numpy does not copy."""
    first = int(rows[0]) if len(rows) else 0
    consecutive = bool((np.diff(rows) == 1).all())
    return slice(first, first + len(rows)) if consecutive else rows
