"""Full disks, damaged models and leftovers: found, repaired where possible, else explained."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.store import ModelStore, StoreError
from baton.store.disk import MARGIN_BYTES
from tests.support.models_on_disk import STORED_FILES, write_gguf


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "home")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def left_in_scratch(store: ModelStore) -> list[Path]:
    return list((store._models / ".scratch").glob("*"))


def test_too_little_disk_is_found_before_anything_is_written(tmp_path: Path, file: Path) -> None:
    store = ModelStore(tmp_path / "home", free=lambda _: MARGIN_BYTES)
    with pytest.raises(StoreError, match=r"needs 32 MiB .*only 32 MiB are free; free some space"):
        store.resolve(str(file))
    assert not (tmp_path / "home/models/tiny").exists()
    assert left_in_scratch(store) == []


def test_a_disk_that_fills_up_meanwhile_is_a_sentence_and_leaves_nothing(
    store: ModelStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("baton.store.gguf_import.write_tensors", full)
    with pytest.raises(StoreError, match="is full; free some space or set BATON_HOME"):
        store.resolve(str(file))
    assert left_in_scratch(store) == []


def test_a_home_that_cannot_be_used_is_a_sentence(tmp_path: Path, file: Path) -> None:
    (tmp_path / "home").write_text("a file, not a directory")
    with pytest.raises(StoreError, match=r"cannot use .*set BATON_HOME"):
        ModelStore(tmp_path / "home").resolve(str(file))


def _shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [Path.unlink, _shorten, _flip])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_damaged_model_is_made_anew_from_its_source(
    store: ModelStore, file: Path, damage: Callable[[Path], None], name: str
) -> None:
    stored = store.resolve(str(file))
    damage(stored.path / name)
    assert store.resolve("tiny") == stored
    assert store.verify("tiny") == stored


def test_a_damaged_model_without_source_says_what_to_do(store: ModelStore, file: Path) -> None:
    stored = store.resolve(str(file))
    file.unlink()
    _shorten(stored.path / "model.safetensors")
    with pytest.raises(StoreError, match=r"damaged, model\.safetensors has .*baton model rm tiny"):
        store.resolve("tiny")


def test_verify_finds_a_flipped_bit_that_size_and_time_hide(store: ModelStore, file: Path) -> None:
    stored = store.resolve(str(file))
    weights = stored.path / "model.safetensors"
    before = weights.stat()
    _flip(weights)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(StoreError, match="does not match its checksum"):
        store.verify("tiny")


def test_touched_but_equal_files_are_accepted(
    store: ModelStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = store.resolve(str(file))
    os.utime(stored.path / "model.safetensors", ns=(1, 1))
    monkeypatch.setattr(ModelStore, "_build", None)
    assert store.resolve("tiny") == stored


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"format": 99}'])
def test_a_directory_without_readable_manifest_is_never_used(
    store: ModelStore, file: Path, text: str | None
) -> None:
    stored = store.resolve(str(file))
    manifest = stored.path / "baton.json"
    manifest.unlink() if text is None else manifest.write_text(text)
    with pytest.raises(StoreError, match=r"no complete model.*baton model rm tiny"):
        store.resolve("tiny")
    assert store.list() == []
    store.remove("tiny")
    assert store.resolve(str(file)) == stored


def test_leftovers_of_a_killed_process_are_replaced(store: ModelStore, file: Path) -> None:
    scratch = store._scratch("tiny")
    scratch.mkdir(parents=True)
    (scratch / "model.safetensors").write_bytes(b"half")
    stored = store.resolve(str(file))
    assert {path.name for path in stored.path.iterdir()} == STORED_FILES
    assert left_in_scratch(store) == []
