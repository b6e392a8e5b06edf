"""Tokenizers out of GGUF: ids stay, text comes back, and unknown rules are refused."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from baton.store.errors import StoreError
from baton.store.gguf_file import read_gguf
from baton.store.gguf_tokenizer import make_tokenizer, read_vocabulary, tokenizer_config
from baton.store.pre_tokenizers import byte_level_pre_tokenizer
from tests.support.models_on_disk import MERGES, TEMPLATE, TOKENS, TYPES, write_gguf

TEXTS = (
    *(
        "Hello world",
        " lead and trail  ",
        "a  b   c\n\n\td",
        "don't I'M we'll",
        "",
        " ",
        "\r\n\x00",
    ),
    *("12345 1,234.56 ²³½ ٣٤", "naïve café 日本語 😀👩‍👩‍👧 é", "def f(x):\n\treturn x**2  # ok"),
    *("<|im_start|>user\nhi<|im_end|>\n", "<tool>x</tool>", "‮abc​﻿", "𝔘𝔫𝔦", "x" * 300),
)
SPM = {"<unk>": 2, "<s>": 3, "</s>": 3, **{f"<0x{i:02X}>": 6 for i in range(256)}}
SPM_PIECES = {"▁": -5.0, "h": -6.0, "e": -6.0, "l": -6.0, "o": -6.0, "w": -6.0}
SPM_PIECES |= {"he": -2.0, "ll": -3.0, "▁he": -1.0, "el": -2.5, "▁hello": -0.2, "llo": -0.5}


def tokenizer_of(path: Path) -> Tokenizer:
    return make_tokenizer(read_vocabulary(read_gguf(path), len(TOKENS)))


def spm_keys(**keys: Any) -> dict[str, Any]:
    tokens = [*SPM, *SPM_PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*SPM.values(), *(1 for _ in SPM_PIECES)],
        "tokenizer.ggml.scores": [*(0.0 for _ in SPM), *SPM_PIECES.values()],
        "tokenizer.ggml.add_bos_token": True,
        **keys,
    }


def spm_tokenizer(tmp_path: Path, **keys: Any) -> Tokenizer:
    path = write_gguf(tmp_path / "spm.gguf", keys=spm_keys(**keys))
    return make_tokenizer(read_vocabulary(read_gguf(path), len(SPM) + len(SPM_PIECES)))


@pytest.fixture
def byte_level(tmp_path: Path) -> Tokenizer:
    return tokenizer_of(write_gguf(tmp_path / "m.gguf"))


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_from_its_tokens(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text).ids
    assert byte_level.decode(ids, skip_special_tokens=False) == text


def test_every_token_keeps_its_position_as_id(byte_level: Tokenizer) -> None:
    assert [byte_level.id_to_token(i) for i in range(len(TOKENS))] == list(TOKENS)
    assert byte_level.get_vocab_size() == len(TOKENS)


def test_control_tokens_are_special_and_user_defined_ones_are_plain(byte_level: Tokenizer) -> None:
    assert byte_level.encode("<|im_start|><tool>").ids == [1, 3]
    added = byte_level.get_added_tokens_decoder()
    assert {i for i, token in added.items() if token.special} == {0, 1, 2}
    assert not added[3].special


def test_smollm_splits_digits_but_gpt2_merges_them(tmp_path: Path, byte_level: Tokenizer) -> None:
    gpt2 = tokenizer_of(write_gguf(tmp_path / "g.gguf", keys={"tokenizer.ggml.pre": "gpt-2"}))
    assert byte_level.encode("12").tokens == ["1", "2"]
    assert gpt2.encode("12").tokens == ["12"]


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40))
def test_smollm_cuts_text_as_its_published_tokenizer_does(text: str) -> None:
    # A letter of a newer Unicode than the regex library knows may be cut otherwise.
    text = "".join(c for c in text if unicodedata.category(c) not in ("Cn", "Cs"))
    published = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    ours = byte_level_pre_tokenizer("smollm", Path("x.gguf"))
    assert ours.pre_tokenize_str(text) == published.pre_tokenize_str(text)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_gpt2_cuts_text_as_the_library_does(text: str) -> None:
    ours = byte_level_pre_tokenizer("gpt-2", Path("x.gguf"))
    assert ours.pre_tokenize_str(text) == pre_tokenizers.ByteLevel(False).pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("llama-bpe", "x12345 isn'T\n\n y", ["x", "123", "45", "Ġisn", "'T", "ĊĊ", "Ġy"]),
        ("qwen2", "x123 isn't", ["x", "1", "2", "3", "Ġisn", "'t"]),
        ("tekken", "helloWorld 12", ["hello", "World", "Ġ", "1", "2"]),
        ("default", "a+b 1234", ["a", "+", "b", "Ġ", "123", "4"]),
        ("smollm", "a  b12", ["a", "Ġ", "Ġb", "1", "2"]),
    ],
)
def test_each_rule_cuts_numbers_words_and_spaces_its_own_way(
    pre: str, text: str, pieces: list[str]
) -> None:
    cut = byte_level_pre_tokenizer(pre, Path("x.gguf")).pre_tokenize_str(text)
    assert [piece for piece, _ in cut] == pieces


def test_unknown_cutting_rules_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", keys={"tokenizer.ggml.pre": "brand-new"})
    with pytest.raises(StoreError, match="'brand-new', which are unknown here; use the model's"):
        tokenizer_of(path)


def test_a_bos_token_is_added_only_when_the_file_says_so(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = tokenizer_of(write_gguf(tmp_path / "m.gguf", keys=keys))
    assert tokenizer.encode("h").ids[:1] == [1] and tokenizer.encode("h").ids[-1:] == [2]
    assert tokenizer.encode("h", add_special_tokens=False).tokens == ["h"]


def test_llama3_begins_with_bos_even_if_the_file_is_silent(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        keys={"tokenizer.ggml.pre": "llama-bpe"},
        drop=("tokenizer.ggml.add_bos_token",),
    )
    assert tokenizer_of(path).encode("he").ids[0] == 1


def test_ends_of_an_answer_are_the_named_ids_then_the_known_ones(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", keys={"tokenizer.ggml.eot_token_id": 3})
    assert read_vocabulary(read_gguf(path), len(TOKENS)).end_ids() == [2, 3, 0]


def test_the_config_holds_the_template_and_the_special_texts(tmp_path: Path) -> None:
    vocabulary = read_vocabulary(read_gguf(write_gguf(tmp_path / "m.gguf")), len(TOKENS))
    config = tokenizer_config(vocabulary, 256)
    assert config["chat_template"] == TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["model_max_length"] == 256 and "pad_token" not in config
    json.dumps(config)


def test_a_file_without_tokenizer_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", drop=("tokenizer.ggml.tokens",))
    with pytest.raises(StoreError, match="no tokenizer inside; use the model's Hugging Face"):
        tokenizer_of(path)


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "no_vocab"])
def test_other_kinds_of_tokenizer_are_refused(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", keys={"tokenizer.ggml.model": kind})
    with pytest.raises(StoreError, match=f"of the kind '{kind}', which is not supported"):
        tokenizer_of(path)


@pytest.mark.parametrize(
    "keys",
    [
        {"tokenizer.ggml.merges": ["zz qq"]},
        {"tokenizer.ggml.merges": ["nospace"]},
        {"tokenizer.ggml.token_type": list(TYPES[:-1])},
        {"tokenizer.ggml.tokens": [*TOKENS[:-1], TOKENS[0]]},
        {"tokenizer.ggml.eos_token_id": len(TOKENS)},
        {"tokenizer.ggml.tokens": [*TOKENS, "x"], "tokenizer.ggml.token_type": [*TYPES, 1]},
    ],
)
def test_a_contradictory_vocabulary_means_damage(tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(StoreError, match=r"damaged, its tokenizer has .*; download it again"):
        tokenizer_of(write_gguf(tmp_path / "m.gguf", keys=keys))


def test_sentence_piece_merges_the_best_scored_pieces_first(tmp_path: Path) -> None:
    tokenizer = spm_tokenizer(tmp_path)
    assert tokenizer.encode("hello", add_special_tokens=False).tokens == ["▁hello"]
    assert tokenizer.encode("wel", add_special_tokens=False).tokens == ["▁", "w", "el"]


def test_sentence_piece_falls_back_to_bytes_and_back_to_text(tmp_path: Path) -> None:
    tokenizer = spm_tokenizer(tmp_path)
    for text in ("hello wow", "hé 😀 1 2", "  two  spaces", "line\nline\t"):
        ids = tokenizer.encode(text).ids
        assert ids[0] == 1 and 0 not in ids
        assert tokenizer.decode(ids) == text


def test_sentence_piece_without_space_prefix_adds_none(tmp_path: Path) -> None:
    tokenizer = spm_tokenizer(tmp_path, **{"tokenizer.ggml.add_space_prefix": False})
    ids = tokenizer.encode("he o", add_special_tokens=False)
    assert ids.tokens == ["he", "▁", "o"]
    assert tokenizer.decode(ids.ids) == "he o"


def test_sentence_piece_never_merges_into_control_tokens(tmp_path: Path) -> None:
    tokenizer = spm_tokenizer(tmp_path)
    assert tokenizer.encode("</s>", add_special_tokens=False).ids == [2]
    assert tokenizer.encode("< s >", add_special_tokens=False).ids.count(1) == 0


def test_sentence_piece_needs_its_scores(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no score for each token"):
        spm_tokenizer(tmp_path, **{"tokenizer.ggml.scores": [0.0]})


def test_merges_in_the_sample_are_used(byte_level: Tokenizer) -> None:
    assert ("he", "ll") in MERGES
    assert byte_level.encode("hell win").tokens == ["hell", "Ġw", "in"]
