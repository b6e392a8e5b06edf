"""What is drafted, how much of it is checked, and what that is learnt from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.speculation.drafting import best_draft
from baton.engine.speculation.estimates import Acceptance, StepTimes
from baton.engine.speculation.lookup import Lookup
from baton.speculate import Speculation, parse_speculation


def test_lookup_drafts_what_followed_the_latest_earlier_occurrence() -> None:
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 6, 7, 1, 2, 3]
    assert Lookup(3).propose(text, 3) == [5, 6, 7]


def test_a_repeat_that_reaches_the_end_goes_round() -> None:
    assert Lookup(2).propose([8, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert Lookup(3).propose([7, 7, 7, 7], 3) == [7, 7, 7]


def test_lookup_drafts_nothing_for_what_was_never_there() -> None:
    assert Lookup(2).propose([1, 2, 3, 4], 4) == []
    assert Lookup(3).propose([1, 1], 4) == []


def test_lookup_is_not_deceived_by_bytes_of_neighbouring_tokens() -> None:
    """0x00000100 0x00000001 holds the bytes of token 1 at an odd place."""
    assert Lookup(1).propose([5, 256, 1 << 24, 1], 2) == []


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 4), st.integers(1, 6))
def test_lookup_equals_a_search_by_hand_however_the_text_grew(
    text: list[int], match: int, count: int
) -> None:
    lookup = Lookup(match)
    for end in range(len(text) + 1):
        got = lookup.propose(text[:end], count)
    newest = text[len(text) - match :]
    starts = [s for s in range(len(text) - match) if text[s : s + match] == newest]
    expected: list[int] = []
    if starts and len(text) > match:
        whole = list(text)
        for _ in range(count):
            whole.append(whole[starts[-1] + match + len(whole) - len(text)])
        expected = whole[len(text) :]
    assert got == expected


def test_the_last_tries_decide_how_often_drafts_are_right() -> None:
    acceptance = Acceptance(prior=0.5, memory=16)
    assert acceptance.share == 0.5
    for _ in range(100):
        acceptance.note(1, 1)
    assert acceptance.share > 0.98
    for _ in range(40):
        acceptance.note(0, 1)
    assert acceptance.share < 0.1


def test_step_times_are_medians_in_proportion_between_sizes_and_flat_beyond() -> None:
    times = StepTimes()
    for seconds in (9.0, 1.0, 1.0):
        times.note(2, seconds)
    times.note(6, 3.0)
    assert times.knows(2) and not times.knows(3)
    assert [times.expected(n) for n in (1, 2, 4, 6, 500)] == [1.0, 1.0, 2.0, 3.0, 3.0]


def test_a_size_that_was_not_seen_for_long_is_forgotten() -> None:
    times = StepTimes()
    times.note(9, 100.0)
    for _ in range(300):
        times.note(1, 1.0)
    assert not times.knows(9) and times.expected(9) == 1.0


def test_where_more_tokens_cost_nothing_all_are_checked() -> None:
    assert sorted(best_draft([(0.5, 3), (0.1, 2)], 2, 99, lambda n: 1.0)) == [0, 0, 0, 1, 1]


def test_where_each_token_costs_as_much_as_a_step_none_is_checked() -> None:
    assert best_draft([(0.9, 8), (0.9, 8)], 2, 99, float) == []


def test_a_sequence_that_is_often_right_gets_the_longer_draft() -> None:
    places = best_draft([(0.9, 8), (0.3, 8)], 2, 99, lambda n: 10 + n)
    assert places.count(0) > places.count(1)


def test_drafts_stay_within_the_budget_of_the_step() -> None:
    assert best_draft([(0.9, 8)], 1, 3, lambda n: 1.0) == [0, 0, 0]
    assert best_draft([(0.9, 8)], 1, -2, lambda n: 1.0) == []


@given(
    st.lists(st.tuples(st.floats(0.01, 0.99), st.integers(0, 4)), min_size=1, max_size=3),
    st.floats(0.0, 2.0),
)
def test_no_other_choice_of_drafts_is_expected_to_be_faster(
    chances: list[tuple[float, int]], price: float
) -> None:
    def seconds(num_tokens: int) -> float:
        return 1 + price * num_tokens

    def rate(lengths: tuple[int, ...]) -> float:
        gained = sum(
            sum(p**k for k in range(n + 1)) for (p, _), n in zip(chances, lengths, strict=True)
        )
        return gained / seconds(len(chances) + sum(lengths))

    places = best_draft(chances, len(chances), 99, seconds)
    chosen = rate(tuple(places.count(i) for i in range(len(chances))))
    options = [()]
    for _, longest in chances:
        options = [(*head, n) for head in options for n in range(longest + 1)]
    assert chosen >= max(map(rate, options)) * (1 - 1e-9)


def test_the_notation_of_speculate_is_read() -> None:
    assert parse_speculation("off") is None
    assert parse_speculation("ngram") == Speculation("ngram", 8, match=3)
    assert parse_speculation("ngram(tokens=5, match=2)") == Speculation("ngram", 5, match=2)
    assert parse_speculation("draft(./small, tokens=2)") == Speculation("draft", 2, model="./small")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("medusa", "medusa"),
        ("off(1)", "off"),
        ("ngram(n=2)", "'n'"),
        ("ngram(match=0)", "match"),
        ("ngram(tokens=65)", "tokens"),
        ("draft", "draft"),
        ("draft()", "draft"),
        ("draft(tokens=2)", "draft"),
    ],
)
def test_a_wrong_notation_is_refused_with_the_part_that_is_wrong(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        parse_speculation(text)
