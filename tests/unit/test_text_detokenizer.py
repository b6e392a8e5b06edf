"""Bytes of tokens become characters, never halves of them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from router.text import Detokenizer, Tokenizer, UnsupportedTokenizer
from tests.support.byte_model import IM_END, VOCAB_SIZE, byte_tokenizer, write_byte_model

BYTES = [bytes([i]) for i in range(256)]


def feed(data: bytes) -> tuple[list[str], str]:
    detokenizer = Detokenizer(BYTES)
    return [detokenizer.push(byte) for byte in data], detokenizer.flush()


def test_a_character_appears_whole_with_its_last_byte() -> None:
    pieces, rest = feed("é😀世".encode())
    assert pieces == ["", "é", "", "", "", "😀", "", "", "世"]
    assert rest == ""


def test_a_character_cut_at_the_end_is_one_replacement_character() -> None:
    pieces, rest = feed("a😀".encode()[:-1])
    assert "".join(pieces) == "a"
    assert rest == "\ufffd"


def test_bytes_that_can_never_be_text_do_not_hold_back_what_follows() -> None:
    pieces, rest = feed(b"\xff\xffab")
    assert pieces == ["\ufffd", "\ufffd", "a", "b"]
    assert rest == ""


def test_an_id_beyond_the_vocabulary_of_the_tokenizer_stands_for_no_text() -> None:
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push(0xC3) == ""
    assert detokenizer.push(9999) == ""
    assert detokenizer.push(0xA9) == "é"


@given(st.text())
def test_joined_pieces_are_the_text_and_none_holds_a_half_character(text: str) -> None:
    pieces, rest = feed(text.encode())
    assert "".join(pieces) + rest == text


@given(st.binary())
def test_pieces_and_rest_equal_decoding_everything_at_once(data: bytes) -> None:
    pieces, rest = feed(data)
    assert "".join(pieces) + rest == data.decode("utf-8", "replace")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(write_byte_model(tmp_path))


@given(st.text())
def test_decoding_what_was_encoded_gives_the_text_back(text: str) -> None:
    backend = byte_tokenizer()
    tokenizer = Tokenizer(backend, {"decoder": {"type": "ByteLevel"}})
    assert tokenizer.decode(backend.encode(text).ids) == text


def test_special_tokens_have_no_text_but_a_name(tokenizer: Tokenizer) -> None:
    (token_id,) = tokenizer.encode(IM_END, False)
    assert tokenizer.decode([65, token_id, 66]) == "AB"
    assert tokenizer.shown_bytes(token_id) == IM_END.encode()
    assert token_id < VOCAB_SIZE


def test_sentencepiece_pieces_become_spaces_and_raw_bytes() -> None:
    vocabulary = {"▁a": 0, "b": 1, "<0xC3>": 2, "<0xA9>": 3}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    description = {
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}]}
    }
    assert Tokenizer(backend, description).decode([0, 1, 2, 3]) == " abé"


def test_a_tokenizer_without_a_byte_table_is_refused_by_name() -> None:
    backend = Backend(models.WordPiece(vocab={"[UNK]": 0}, unk_token="[UNK]"))
    with pytest.raises(UnsupportedTokenizer, match="WordPiece"):
        Tokenizer(backend, {"decoder": {"type": "WordPiece"}})


def test_a_missing_or_damaged_tokenizer_file_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTokenizer, match="cannot read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UnsupportedTokenizer, match="not a valid tokenizer"):
        Tokenizer.load(tmp_path)
