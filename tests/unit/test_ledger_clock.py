"""The offset of another clock, from messages that take time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.ledger.clock import ClockOffset

delays = st.floats(0, 0.5)


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(delays, delays), min_size=1, max_size=8))
def test_the_true_offset_is_within_the_stated_error(
    true: float, trips: list[tuple[float, float]]
) -> None:
    clock, now = ClockOffset(), 1000.0
    for there, back in trips:
        clock.sent(now, now + there + true)
        clock.received(now + there + true, now + there + back)
        now += 1
    assert clock.error is not None
    assert abs(clock.offset - true) <= clock.error + 1e-6
    assert clock.error <= min(max(trip) for trip in trips) + 1e-6


def test_more_messages_never_widen_the_error() -> None:
    clock = ClockOffset()
    clock.sent(0.0, 10.2)
    clock.received(10.2, 0.5)
    before = clock.error
    clock.received(11.0, 1.1)
    assert before == pytest.approx(0.25) and clock.error == pytest.approx(0.15)
    clock.received(12.0, 9.0)
    assert clock.error == pytest.approx(0.15)


def test_one_sided_bounds_give_an_offset_that_keeps_causes_before_effects() -> None:
    clock = ClockOffset()
    assert not clock.known
    clock.received(50.0, 1.0)
    assert clock.known and clock.error is None
    assert 50.0 - clock.offset <= 1.0
