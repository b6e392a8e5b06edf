"""Stop strings end a text, and no part of one is ever shown."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from router.text import StopMatcher, StopPatterns


def run(pieces: Sequence[str], stops: Sequence[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(StopPatterns(stops))
    shown = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown.append(text)
        if matched:
            return shown, True
    return [*shown, matcher.flush()], False


def test_without_stops_everything_passes_at_once() -> None:
    assert run(["ab", "c"], []) == (["ab", "c", ""], False)


def test_a_stop_over_several_pieces_is_held_back_and_cut() -> None:
    assert run(["one ST", "O", "P two"], ["STOP"]) == (["one ", "", ""], True)


def test_a_beginning_that_turns_out_otherwise_is_shown_late_but_whole() -> None:
    assert run(["a ST", "ART"], ["STOP"]) == (["a ", "START", ""], False)


def test_only_the_longest_suffix_that_may_begin_a_stop_is_held() -> None:
    assert run(["xaab", "a"], ["aabaac"])[0] == ["x", "", "aaba"]


def test_a_stop_in_the_first_piece_leaves_what_stands_before_it() -> None:
    assert run(["hiSTOP"], ["STOP"]) == (["hi"], True)
    assert run(["STOP"], ["STOP"]) == ([""], True)


def test_the_stop_that_completes_first_wins() -> None:
    assert run(["a--b##c"], ["##", "--"]) == (["a"], True)


def test_of_stops_that_complete_together_the_longest_is_cut() -> None:
    assert run(["xabc"], ["c", "abc", "bc"]) == (["x"], True)


def test_a_self_overlapping_stop_is_found_after_a_false_start() -> None:
    assert run(["aab", "aab", "aabb"], ["aabaabb"]) == (["", "", "aab"], True)


def test_an_emoji_stop_is_cut_whole() -> None:
    assert run(["ok ", "😀", "x"], ["😀"]) == (["ok ", ""], True)


def test_an_unarmed_match_is_ordinary_text() -> None:
    matcher = StopMatcher(StopPatterns(["ab"]))
    assert matcher.push("xab", armed=False) == ("xab", False)
    assert matcher.push("ab") == ("", True)


def test_a_stop_begun_before_arming_still_counts_when_completed_after() -> None:
    matcher = StopMatcher(StopPatterns(["abc"]))
    assert matcher.push("xab", armed=False) == ("x", False)
    assert matcher.push("c") == ("", True)


def naive(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


ALPHABET = "ab😀"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


@given(st.lists(st.text(ALPHABET, max_size=5)), STOPS)
def test_the_result_does_not_depend_on_where_pieces_are_cut(
    pieces: list[str], stops: list[str]
) -> None:
    shown, matched = run(pieces, stops)
    assert ("".join(shown), matched) == naive("".join(pieces), stops)


@given(st.lists(st.text(ALPHABET, max_size=5)), STOPS)
def test_nothing_shown_could_have_been_part_of_a_stop(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(StopPatterns(stops))
    shown = ""
    for i, piece in enumerate(pieces):
        text, matched = matcher.push(piece)
        shown += text
        if matched:
            return
        seen = "".join(pieces[: i + 1])
        held = len(seen) - len(shown)
        longest = max(
            k for stop in stops for k in range(len(stop)) if seen.endswith(stop[:k]) or k == 0
        )
        assert held == longest
