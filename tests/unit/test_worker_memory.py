"""A container's limit counts as the machine's memory does."""

from pathlib import Path

import psutil
import pytest

from baton.cluster.errors import SettingsError
from baton.worker import boot
from baton.worker.memory import available_bytes

MIB = 1 << 20


def group(folder: Path, v2: bool, limit: str, used: int, cached: int) -> Path:
    names = ("memory.max", "memory.current", "inactive_file")
    if not v2:
        folder = folder / "memory"
        folder.mkdir()
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\nfile 7\n")
    return folder if v2 else folder.parent


@pytest.mark.parametrize("v2", [True, False])
def test_what_a_container_has_left_is_its_limit_less_what_it_uses_but_for_cached_files(
    tmp_path: Path, v2: bool
) -> None:
    folder = group(tmp_path, v2, str(64 * MIB), 50 * MIB, 10 * MIB)
    assert available_bytes(folder) == 24 * MIB


def test_a_container_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    assert available_bytes(group(tmp_path, True, str(MIB), 2 * MIB, 0)) == 0


@pytest.mark.parametrize("v2", [True, False])
def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path, v2: bool) -> None:
    limit = "max" if v2 else str((1 << 63) - 4096)
    folder = group(tmp_path, v2, limit, MIB, 0)
    assert 0 < available_bytes(folder) <= psutil.virtual_memory().total
    assert 0 < available_bytes(tmp_path / "nothing") <= psutil.virtual_memory().total


def test_a_pool_that_the_container_cannot_hold_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(boot, "available_bytes", lambda: 10 * MIB)
    boot._check_memory(10 * MIB, "the KV pool of 5 blocks")
    with pytest.raises(SettingsError, match="the KV pool of 6 blocks: 12 MiB are needed, 10 MiB"):
        boot._check_memory(12 * MIB, "the KV pool of 6 blocks")
