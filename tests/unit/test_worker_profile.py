"""A kept profile is of the same model, settings and hardware, or it is not used."""

from typing import Any

import pytest

from baton.cluster.settings import DecodeSettings
from baton.engine.config import EngineConfig
from baton.engine.decode_scheduler import DecodeScheduler
from baton.worker import profile

CONFIG = EngineConfig(num_blocks=64, block_size=16, max_num_seqs=8, chunk_size=64)


def key(**settings: Any) -> str:
    return profile._key(DecodeSettings.build(model="m", **settings), CONFIG, DecodeScheduler)


@pytest.mark.parametrize("changes", [{"kv_dtype": "int8"}, {"kv_policy": "h2o(budget=0.5)"}])
def test_another_kind_of_cache_is_measured_anew(changes: dict[str, str]) -> None:
    assert key() == key() != key(**changes)


def test_other_kernels_are_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.setenv("BATON_KERNELS", "off")
    assert key() != before
