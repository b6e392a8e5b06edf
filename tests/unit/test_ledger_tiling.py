"""Phases that count cover a request exactly; what runs beside them keeps its whole length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.ledger.tiling import GAP, Phase, Span, tile

END = 100.0


def span(name: str, start: float, end: float, rank: int = 0) -> Span:
    return Span(name, "here", start, end, rank)


def shown(phases: list[Phase]) -> list[tuple[str, float, float, bool]]:
    return [(phase.name, phase.start, phase.end, phase.overlapped) for phase in phases]


moments = st.integers(-20, 120).map(float)
spans = st.lists(
    st.tuples(moments, moments, st.integers(0, 3)).map(
        lambda t: span(f"s{t[0]}-{t[1]}-{t[2]}", min(t[:2]), max(t[:2]), t[2])
    ),
    max_size=12,
)


@given(spans)
def test_the_phases_that_count_cover_the_request_without_gap_or_overlap(given: list[Span]) -> None:
    counted = [phase for phase in tile(given, 0.0, END) if not phase.overlapped]
    at = 0.0
    for phase in counted:
        assert phase.start == at and phase.end > at
        at = phase.end
    assert at == END


@given(spans)
def test_every_span_keeps_its_length(given: list[Span]) -> None:
    phases = [phase for phase in tile(given, 0.0, END) if phase.name != GAP]
    clipped = sum(max(0.0, min(s.end, END) - max(s.start, 0.0)) for s in given)
    assert sum(phase.duration for phase in phases) == pytest.approx(clipped)


@given(spans)
def test_at_every_instant_the_lowest_rank_counts(given: list[Span]) -> None:
    for phase in tile(given, 0.0, END):
        if phase.overlapped:
            continue
        middle = (phase.start + phase.end) / 2
        ranks = [s.rank for s in given if s.start <= middle < s.end]
        if not ranks:
            assert phase.name == GAP
        else:
            assert any(
                s.name == phase.name and s.rank == min(ranks) for s in given if s.start <= middle
            )


def test_a_transfer_counts_where_nothing_computes() -> None:
    phases = tile([span("compute", 0, 10, 2), span("transfer", 4, 15, 3)], 0, 20)
    assert shown(phases) == [
        ("compute", 0, 10, False),
        ("transfer", 4, 10, True),
        ("transfer", 10, 15, False),
        (GAP, 15, 20, False),
    ]


def test_a_span_that_is_interrupted_comes_back_as_a_second_piece() -> None:
    phases = tile([span("wait", 0, 10, 4), span("work", 3, 5, 0)], 0, 10)
    assert shown(phases) == [
        ("wait", 0, 3, False),
        ("work", 3, 5, False),
        ("wait", 3, 5, True),
        ("wait", 5, 10, False),
    ]


def test_spans_are_cut_to_the_request() -> None:
    assert shown(tile([span("long", -5, float("inf"))], 0, 3)) == [("long", 0, 3, False)]
    assert shown(tile([], 1, 3)) == [(GAP, 1, 3, False)]
