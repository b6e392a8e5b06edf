"""Reading the GGUF container: complete files only, and a sentence for every other."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from baton.store.errors import StoreError
from baton.store.gguf_file import read_gguf
from tests.support.models_on_disk import TOKENS, write_gguf


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def test_metadata_and_tensors_are_those_of_the_gguf_package(file: Path) -> None:
    ours, theirs = read_gguf(file), gguf.GGUFReader(file)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert ours.metadata[name] == field.contents()
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
    assert ours.metadata["tokenizer.ggml.tokens"] == list(TOKENS)


def test_a_file_cut_off_anywhere_is_called_truncated(file: Path, tmp_path: Path) -> None:
    whole, cut = file.read_bytes(), tmp_path / "cut.gguf"
    for size in sorted({*range(8, 400, 7), *range(400, len(whole), 997), len(whole) - 1}):
        cut.write_bytes(whole[:size])
        with pytest.raises(StoreError, match=r"truncated or damaged.*download it again"):
            read_gguf(cut)


def test_no_flipped_byte_in_the_header_escapes_as_another_error(file: Path, tmp_path: Path) -> None:
    whole, bad = bytearray(file.read_bytes()), tmp_path / "bad.gguf"
    rng = np.random.default_rng(1)
    for position in rng.integers(8, 6000, size=300):
        changed = bytearray(whole)
        changed[position] ^= int(rng.integers(1, 256))
        bad.write_bytes(changed)
        try:
            read_gguf(bad)
        except StoreError as error:
            assert str(bad) in str(error)


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        (b"", "not a GGUF file"),
        (b"<html>Not Found</html>", "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "version 1; convert it"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 1), "more than its size allows|inside its own"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 2**60), "more than its size allows"),
    ],
)
def test_what_is_no_gguf_file_is_refused(tmp_path: Path, head: bytes, sentence: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(head)
    with pytest.raises(StoreError, match=sentence):
        read_gguf(path)
