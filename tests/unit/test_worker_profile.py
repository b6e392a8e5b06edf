"""A kept profile is of the same model, settings and hardware, or it is not used."""

import dataclasses
from typing import Any

import pytest

from baton.cluster.settings import DecodeSettings
from baton.engine.config import EngineConfig
from baton.engine.decode_scheduler import DecodeScheduler
from baton.step_totals import StepTotals
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


@pytest.mark.parametrize(
    ("threads", "share", "seconds"), [(1, 0.5, 0.2), (1, 1.01, 0.4), (2, 0.5, 0.4)]
)
def test_a_worker_that_shared_its_core_while_it_measured_says_what_it_takes_alone(
    monkeypatch: pytest.MonkeyPatch, threads: int, share: float, seconds: float
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    measured = StepTotals(2, 64, 2080, 0, 0, 0.4)
    assert profile.alone(measured, share) == dataclasses.replace(measured, seconds=seconds)
