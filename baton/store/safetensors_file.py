"""The safetensors format, read and written with the standard library alone.

The writer streams: the header is known beforehand, tensors follow in its order, and the checksum
is taken on the way, so memory stays that of one chunk. Knows nothing of models.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.store.disk import Advance
from baton.store.errors import StoreError

_MAX_HEADER = 100_000_000
_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class TensorSpec:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def encode_header(specs: Sequence[TensorSpec]) -> bytes:
    """Length, JSON and the padding that keeps the data 8-byte aligned."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.nbytes
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_tensors(
    path: Path,
    tensors: Iterable[tuple[TensorSpec, Iterable[bytes]]],
    specs: Sequence[TensorSpec],
    advance: Advance,
) -> str:
    """Write `tensors` in the order of `specs`; returns the SHA-256 of the file."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        header = encode_header(specs)
        file.write(header)
        digest.update(header)
        for spec, chunks in tensors:
            written = 0
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                advance(len(chunk))
                written += len(chunk)
            if written != spec.nbytes:
                raise ValueError(f"{spec.name}: {written} bytes for a tensor of {spec.nbytes}")
    return digest.hexdigest()


def read_header(path: Path) -> dict[str, dict[str, object]]:
    """Tensor entries of a complete, undamaged file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise _damaged(path, "its header is cut off")
        text = file.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise _damaged(path, "its header cannot be read") from error
    if 8 + length + end != size:
        raise _damaged(path, f"it has {size} bytes instead of {8 + length + end}")
    return entries


def _damaged(path: Path, why: str) -> StoreError:
    return StoreError(f"{path} is truncated or damaged, {why}; download it again.")
