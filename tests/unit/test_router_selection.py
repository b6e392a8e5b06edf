"""What a decision tells those who decide next."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from baton.cluster.workers import Role, WorkerRecord
from router.placement import Plan
from router.placement.cost import Cost
from router.selection import Selection
from tests.support.candidates import record

PREFILL, DECODE = record(Role.PREFILL, "p"), record(Role.DECODE, "d")


class ToldIndex:
    """Notes who is said to have a prompt's blocks soon."""

    def __init__(self) -> None:
        self.told: list[str] = []

    @contextmanager
    def expecting(self, _: Any, workers: Iterable[WorkerRecord]) -> Iterator[None]:
        self.told += [worker.worker_id for worker in workers]
        yield


@pytest.mark.parametrize(
    ("prefill", "decode", "where"),
    [(PREFILL, DECODE, "p"), (None, DECODE, "d"), (PREFILL, None, "p")],
)
def test_a_prompt_is_expected_where_it_is_computed_and_not_where_its_cache_is_handed_to(
    prefill: WorkerRecord | None, decode: WorkerRecord | None, where: str
) -> None:
    """A sibling was sent to compute at the decode worker of a pair, as if the prompt were cached
    there, before it had been handed over: it computed everything, beside all who decoded."""
    index, leg = ToldIndex(), SimpleNamespace(blocks=None, ships_less=False)
    selection = Selection("f", None, None, index)  # type: ignore[arg-type]
    with selection.expecting(leg, Plan(prefill, decode, Cost())):  # type: ignore[arg-type]
        assert index.told == [where]


@pytest.mark.parametrize(("ships_less", "told"), [(False, ["d"]), (True, [])])
def test_a_cache_that_was_handed_over_counts_at_once_unless_it_lacks_tokens(
    ships_less: bool, told: list[str]
) -> None:
    index, leg = ToldIndex(), SimpleNamespace(blocks=None, ships_less=ships_less)
    selection = Selection("f", None, None, index)  # type: ignore[arg-type]
    selection.landed(leg, DECODE)  # type: ignore[arg-type]
    assert index.told == told
