"""Turns go by priority, level between tenants, by earliest feasible deadline; nobody starves."""

import itertools
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from router.fair_queue import OLDEST_EVERY, PATIENCE_S, FairQueue, Ticket

NUMBERS = itertools.count()


def ticket(at: float = 0.0, **fields: object) -> Ticket:
    return Ticket(next(NUMBERS), at, **fields)  # type: ignore[arg-type]


def order(*tickets: Ticket, now: float = 0.0) -> list[Ticket]:
    queue = FairQueue()
    for one in tickets:
        queue.push(one)
    return [queue.pop(now) for _ in tickets]


def test_without_any_wish_it_is_first_come_first_served() -> None:
    one, two, three = ticket(0), ticket(1), ticket(2)
    assert order(three, one, two, now=3) == [one, two, three]


def test_the_earliest_deadline_goes_first_unless_it_cannot_be_met() -> None:
    soon, later = ticket(due_at=2.0), ticket(due_at=5.0)
    hopeless = ticket(due_at=0.5, work_s=1.0)
    assert order(later, hopeless, soon) == [soon, later, hopeless]


def test_a_higher_priority_goes_first_whatever_the_deadlines() -> None:
    high, low = ticket(due_at=9.0, priority=1), ticket(due_at=1.0)
    assert order(low, high) == [high, low]


def test_one_turn_in_so_many_is_of_who_has_waited_longest_whatever_its_priority() -> None:
    now = 2 * PATIENCE_S
    old = [ticket(0.0), ticket(1.0)]
    urgent = [ticket(now, priority=1, due_at=now + 1) for _ in range(2 * OLDEST_EVERY)]
    turns = order(*urgent, *old, now=now)
    assert [turns.index(one) for one in old] == [0, OLDEST_EVERY]


def test_a_backlog_that_is_late_does_not_make_newcomers_late() -> None:
    """Those who waited for more than 10 s went first, and so nobody was in time any more."""
    now = 3 * PATIENCE_S
    backlog = [ticket(0.0, due_at=1.0) for _ in range(100)]
    fresh = [ticket(now, due_at=now + 1) for _ in range(2 * OLDEST_EVERY)]
    turns = order(*backlog, *fresh, now=now)
    assert set(fresh) <= set(turns[: len(fresh) + 3])


def test_a_turn_that_is_given_back_is_not_used_up() -> None:
    queue, now = FairQueue(), 2 * PATIENCE_S
    old, new = ticket(0.0), ticket(now, priority=1)
    queue.push(old)
    queue.push(new)
    for _ in range(3):
        assert queue.pop(now) is old
        queue.push(old)


def test_a_request_that_goes_back_has_its_old_place_and_is_not_charged_twice() -> None:
    queue = FairQueue()
    first, other = ticket(tenant="a", tokens=100), ticket(tenant="b", tokens=100)
    queue.push(first)
    queue.push(other)
    assert queue.pop(0) is first
    queue.push(first)
    assert queue.pop(0) is first
    assert queue.pop(0) is other


def test_a_tenant_that_was_idle_cannot_have_saved_up() -> None:
    queue = FairQueue()
    for number in range(20):
        queue.push(ticket(number * 1e-3, tenant="busy", tokens=10))
    for _ in range(10):
        queue.pop(1.0)
    late = [ticket(1.0, tenant="late", tokens=10) for _ in range(10)]
    for one in late:
        queue.push(one)
    turns = Counter(queue.pop(1.0).tenant for _ in range(10))
    assert turns == {"busy": 5, "late": 5}


def test_tenants_share_tokens_within_ten_percent_however_they_ask() -> None:
    """One sends many small requests, one few large ones, one floods: all have a backlog."""
    rng, queue, given = random.Random(5), FairQueue(), Counter[str]()
    sizes = {"small": (10, 40), "large": (400, 900), "flood": (50, 300)}
    backlog = {"small": 60, "large": 5, "flood": 150}

    def arrive(tenant: str, now: float) -> None:
        queue.push(ticket(now, tenant=tenant, tokens=rng.randint(*sizes[tenant])))

    for tenant, count in backlog.items():
        for _ in range(count):
            arrive(tenant, 0.0)
    for step in range(3000):
        now = step * 1e-3
        turn = queue.pop(now)
        given[turn.tenant] += turn.tokens
        arrive(turn.tenant, now)
    fair = sum(given.values()) / 3
    assert all(abs(tokens - fair) <= 0.1 * fair for tokens in given.values()), given


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.5, 0.95))
def test_nobody_starves(seed: int, load: float) -> None:
    """A low rank without a deadline, against a stream of urgent requests of higher rank."""
    rng, queue = random.Random(seed), FairQueue()
    poor = ticket(0.0, priority=-2, tenant="poor")
    queue.push(poor)
    now = 0.0
    while poor in queue:
        now += 0.05
        assert now <= 6 * PATIENCE_S, "it never got its turn"
        if rng.random() < load:
            queue.push(ticket(now, priority=1, due_at=now + rng.random(), tenant="rich"))
            queue.push(ticket(now, priority=1, due_at=now + rng.random(), tenant="rich"))
        if len(queue):
            queue.pop(now)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 500)), min_size=1, max_size=40))
def test_each_ticket_gets_exactly_one_turn(asked: list[tuple[str, int]]) -> None:
    tickets = [ticket(tenant=tenant, tokens=tokens) for tenant, tokens in asked]
    assert sorted(t.number for t in order(*tickets)) == sorted(t.number for t in tickets)
