"""Tokens in, deltas out: text, logprobs, counts and finish reasons stay in step."""

from pathlib import Path

import pytest

from baton.v1 import common_pb2
from router.generation import BrokenSequence, Delta, Generation
from router.text import StopPatterns, Tokenizer
from tests.support.byte_model import write_byte_model

STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_byte_model(Path(tmp_path_factory.mktemp("model"))))


def token(index: int, byte: int, finish: int = 0, choice: int = 0, logprobs: bool = False):
    made = common_pb2.Token(choice=choice, token_id=byte, index=index, finish_reason=finish)
    if logprobs:
        made.logprobs.logprob = -1.0
    return made


def say(
    tokenizer: Tokenizer,
    data: bytes,
    finish: int = LENGTH,
    stops: tuple[str, ...] = (),
    min_tokens: int = 0,
) -> tuple[Generation, list[Delta]]:
    generation = Generation(1, tokenizer, StopPatterns(stops), min_tokens)
    deltas: list[Delta] = []
    for i, byte in enumerate(data):
        last = finish if i == len(data) - 1 else 0
        deltas += generation.push([token(i, byte, last, logprobs=True)])
    return generation, deltas


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def shown_bytes(deltas: list[Delta]) -> bytes:
    return b"".join(entry.data for delta in deltas for entry in delta.logprobs)


def test_the_stopping_token_is_counted_but_not_shown(tokenizer: Tokenizer) -> None:
    generation, deltas = say(tokenizer, b"hi.", STOP)
    assert text_of(deltas) == "hi"
    assert shown_bytes(deltas) == b"hi"
    assert generation.num_tokens == 3
    assert deltas[-1].finish_reason == "stop"


def test_a_length_finish_shows_the_last_token_and_what_was_held(tokenizer: Tokenizer) -> None:
    _, deltas = say(tokenizer, b"ab EN", LENGTH, ("END",))
    assert text_of(deltas) == "ab EN"
    assert shown_bytes(deltas) == b"ab EN"
    assert deltas[-1].finish_reason == "length"


def test_a_stop_string_ends_the_choice_and_later_tokens_count_for_nothing(
    tokenizer: Tokenizer,
) -> None:
    generation, deltas = say(tokenizer, b"abENDxyz", LENGTH, ("END",))
    assert text_of(deltas) == "ab"
    assert shown_bytes(deltas) == b"ab"
    assert generation.num_tokens == 5
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["stop"]
    assert not generation.unfinished(range(len(generation.choices)))


def test_a_stop_completed_by_the_last_token_is_a_stop(tokenizer: Tokenizer) -> None:
    _, deltas = say(tokenizer, b"abEND", LENGTH, ("END",))
    assert (text_of(deltas), deltas[-1].finish_reason) == ("ab", "stop")


def test_min_tokens_lets_early_stop_strings_through(tokenizer: Tokenizer) -> None:
    generation, deltas = say(tokenizer, b"aXbXcXd", LENGTH, ("X",), min_tokens=4)
    assert text_of(deltas) == "aXb"
    assert generation.num_tokens == 4


def test_text_and_logprobs_of_split_characters_come_together(tokenizer: Tokenizer) -> None:
    _, deltas = say(tokenizer, "a😀b".encode())
    for delta in deltas:
        assert b"".join(entry.data for entry in delta.logprobs).decode() == delta.text
    assert text_of(deltas) == "a😀b"


def test_text_offsets_count_characters(tokenizer: Tokenizer) -> None:
    _, deltas = say(tokenizer, "é!".encode())
    assert [e.text_offset for d in deltas for e in d.logprobs] == [0, 0, 1]


def test_a_cut_character_shows_once_at_the_end(tokenizer: Tokenizer) -> None:
    _, deltas = say(tokenizer, "a😀".encode()[:3])
    assert text_of(deltas) == "a\ufffd"


def test_choices_end_independently(tokenizer: Tokenizer) -> None:
    generation = Generation(2, tokenizer, StopPatterns(["!"]), 0)
    tokens = [token(0, ord("!"), choice=0), token(0, ord("a"), choice=1)]
    first, second = generation.push(tokens)
    assert (first.finish_reason, second.finish_reason) == ("stop", None)
    assert generation.ended_by_text(tokens) == [0]
    assert generation.unfinished((0, 1))
    generation.push([token(1, ord("x"), choice=0), token(1, ord("!"), choice=1)])
    assert not generation.unfinished(range(len(generation.choices)))
    assert [choice.num_tokens for choice in generation.choices] == [1, 2]


def test_a_gap_a_repeat_or_an_unknown_choice_is_noticed(tokenizer: Tokenizer) -> None:
    generation = Generation(1, tokenizer, StopPatterns(()), 0)
    generation.push([token(0, 65)])
    for bad in (token(0, 65), token(2, 65), token(1, 65, choice=1)):
        with pytest.raises(BrokenSequence):
            generation.push([bad])
