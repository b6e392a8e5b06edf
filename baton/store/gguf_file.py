"""The GGUF container: metadata and where each tensor lies. Nothing about models.

A reader of its own rather than the `gguf` package's, since that takes seconds for a large
vocabulary and reads past the end of a truncated file without a word. Every length is checked
against the file's size before it is believed.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.store.errors import StoreError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_MAX_DIMS = 4


@dataclass(frozen=True)
class TensorInfo:
    """`shape` is in row-major order, as numpy and safetensors have it; `offset` is in the file."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Damaged(Exception):
    """Why the file cannot be what it claims to be."""


class _Cursor:
    """Reads forward and never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def claim(self, size: int) -> int:
        start = self.at
        if size > len(self._data) - start:
            raise _Damaged(f"it ends at byte {len(self._data)}, inside its own header")
        self.at += size
        return start

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        start = self.claim(struct.calcsize(code) * count)
        return struct.unpack_from(f"<{count}{code}", self._data, start)

    def string(self) -> str:
        size = self.scalar("Q")
        start = self.claim(size)
        return self._data[start : start + size].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.scalar(_scalar_code(kind))

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _ARRAY:
            raise _Damaged("it has an array of arrays in its metadata")
        if kind == _STRING:
            return [self.string() for _ in range(self.bounded(count, 8))]
        return list(self.scalars(_scalar_code(kind), self.bounded(count, 1)))

    def bounded(self, count: int, least_size: int) -> int:
        """Refuse a count that the rest of the file cannot hold before looping over it."""
        if count * least_size > len(self._data) - self.at:
            raise _Damaged(f"it claims {count} entries, more than its size allows")
        return int(count)


def _scalar_code(kind: int) -> str:
    try:
        return _SCALARS[kind]
    except KeyError:
        raise _Damaged(f"it has a metadata value of the unknown type {kind}") from None


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a complete file; StoreError for anything else."""
    try:
        with path.open("rb") as file:
            _check_magic(path, file.read(8))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(path, data)
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror}); check it.") from error
    except (_Damaged, UnicodeDecodeError, OverflowError) as error:
        why = error if isinstance(error, _Damaged) else "its header cannot be read"
        raise StoreError(f"{path} is truncated or damaged: {why}; download it again.") from error


def _check_magic(path: Path, head: bytes) -> None:
    if len(head) < 8 or head[:4] != _MAGIC:
        raise StoreError(f"{path} is not a GGUF file, or is damaged; download it again.")
    version = int.from_bytes(head[4:], "little")
    if version & 0xFFFF == 0:
        raise StoreError(f"{path} is a big-endian GGUF file; get the little-endian one.")
    if version not in _VERSIONS:
        raise StoreError(
            f"{path} has GGUF version {version}; convert it to version 3 with a current llama.cpp."
        )


def _read(path: Path, data: mmap.mmap) -> GGUFFile:
    cursor = _Cursor(data)
    cursor.claim(8)
    num_tensors, num_values = cursor.scalars("Q", 2)
    metadata = {}
    for _ in range(cursor.bounded(num_values, 13)):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    raw = [_tensor_fields(cursor) for _ in range(cursor.bounded(num_tensors, 24))]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise _Damaged(f"it has the alignment {alignment!r}")
    start = cursor.at + -cursor.at % alignment
    tensors = [_tensor_info(*fields, start, len(data)) for fields in raw]
    return GGUFFile(path, metadata, {tensor.name: tensor for tensor in tensors})


def _tensor_fields(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, dims = cursor.string(), cursor.scalar("I")
    if not 1 <= dims <= _MAX_DIMS:
        raise _Damaged(f"tensor {name!r} has {dims} dimensions")
    shape = tuple(reversed(cursor.scalars("Q", dims)))
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _tensor_info(
    name: str, shape: tuple[int, ...], kind: int, offset: int, start: int, size: int
) -> TensorInfo:
    block, block_bytes = _block_sizes(name, kind)
    if shape[-1] % block:
        raise _Damaged(f"tensor {name!r} has rows of {shape[-1]}, no multiple of {block}")
    info = TensorInfo(name, shape, kind, start + offset, math.prod(shape) // block * block_bytes)
    if info.offset + info.nbytes > size:
        raise _Damaged(
            f"tensor {name!r} ends at byte {info.offset + info.nbytes}, the file at byte {size}"
        )
    return info


def _block_sizes(name: str, kind: int) -> tuple[int, int]:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        return GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise _Damaged(
            f"tensor {name!r} has the unknown type {kind} (or `pip install -U gguf` knows it)"
        ) from None
