"""tokenizer.json and tokenizer_config.json from the vocabulary inside a GGUF file.

Two kinds exist in the served families: `gpt2` (byte-level BPE with merges) and `llama`
(SentencePiece BPE, whose merges follow from the scores). Token ids never change: id = position.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.store.errors import StoreError
from baton.store.gguf_file import GGUFFile
from baton.store.gguf_metadata import Metadata
from baton.store.pre_tokenizers import (
    BEGIN_BY_DEFAULT,
    NORMALIZED,
    WHOLE_WORDS_FIRST,
    byte_level_pre_tokenizer,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "▁"
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>")
_KEY = "tokenizer.ggml."


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file, checked: each id has a text and a type."""

    metadata: Metadata
    tokens: list[str]
    types: list[int]

    @property
    def pre(self) -> str:
        return self.metadata.text(f"{_KEY}pre", "default")

    @property
    def kind(self) -> str:
        return self.metadata.text(f"{_KEY}model", "")

    def special(self, key: str) -> str | None:
        token_id = self.metadata.token_id(key)
        return None if token_id is None else self.tokens[token_id]

    @property
    def adds_bos(self) -> bool:
        default = self.kind == "llama" or self.pre in BEGIN_BY_DEFAULT
        return self.metadata.flag(f"{_KEY}add_bos_token", default)

    @property
    def adds_eos(self) -> bool:
        return self.metadata.flag(f"{_KEY}add_eos_token", False)

    def end_ids(self) -> list[int]:
        """Ids that end an answer: those the file names, then well-known control tokens."""
        named = (self.metadata.token_id(key) for key in ("eos", "eot", "eom"))
        known = (
            token_id
            for token_id, text in enumerate(self.tokens)
            if text in _ENDS and self.types[token_id] in (_CONTROL, _USER_DEFINED)
        )
        return list(dict.fromkeys(i for i in (*named, *known) if i is not None))


def read_vocabulary(file: GGUFFile, vocab_size: int) -> Vocabulary:
    metadata = Metadata(file)
    if not metadata.raw(f"{_KEY}tokens"):
        raise StoreError(
            f"{file.path} has no tokenizer inside; use the model's Hugging Face directory or "
            "another conversion."
        )
    tokens = metadata.strings(f"{_KEY}tokens")
    types = metadata.raw(f"{_KEY}token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens) or not 0 < len(tokens) <= vocab_size:
        raise _damaged(metadata, f"{len(tokens)} tokens with {len(types)} types")
    if len(set(tokens)) != len(tokens):
        raise _damaged(metadata, "the same token twice")
    types = list(types)
    for key in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        token_id = metadata.token_id(key)
        if token_id is None:
            continue
        if token_id >= len(tokens):
            raise _damaged(metadata, f"a {key} token outside its vocabulary")
        if types[token_id] == _NORMAL:
            types[token_id] = _CONTROL
    return Vocabulary(metadata, tokens, types)


def make_tokenizer(vocabulary: Vocabulary) -> "Tokenizer":
    makers = {"gpt2": _byte_level, "llama": _sentence_piece}
    maker = makers.get(vocabulary.kind)
    if maker is None:
        raise StoreError(
            f"{vocabulary.metadata.path} has a tokenizer of the kind {vocabulary.kind!r}, which is "
            "not supported; use the model's Hugging Face directory."
        )
    try:
        tokenizer = maker(vocabulary)
    except StoreError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        raise _damaged(vocabulary.metadata, f"a bad vocabulary ({error})") from error
    _add_tokens(tokenizer, vocabulary)
    _add_template(tokenizer, vocabulary)
    return tokenizer


def _byte_level(vocabulary: Vocabulary) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    metadata = vocabulary.metadata
    merges = [_pair(merge, metadata) for merge in metadata.strings(f"{_KEY}merges")]
    vocab = {text: i for i, text in enumerate(vocabulary.tokens)}
    whole = vocabulary.pre in WHOLE_WORDS_FIRST
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole))
    tokenizer.pre_tokenizer = byte_level_pre_tokenizer(vocabulary.pre, metadata.path)
    tokenizer.decoder = decoders.ByteLevel()
    if vocabulary.pre in NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _pair(merge: str, metadata: Metadata) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise _damaged(metadata, f"the merge {merge!r}")
    return left, right


def _sentence_piece(vocabulary: Vocabulary) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    prefix = vocabulary.metadata.flag(f"{_KEY}add_space_prefix", True)
    vocab = {text: i for i, text in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(vocabulary, vocab),
            unk_token=vocabulary.special("unknown") or vocabulary.tokens[0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replace = normalizers.Replace(" ", _SPACE)
    steps = [normalizers.Prepend(_SPACE), replace] if prefix else [replace]
    tokenizer.normalizer = normalizers.Sequence(steps)
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([*decoding, *strip])
    return tokenizer


def _merges_from_scores(vocabulary: Vocabulary, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best token first."""
    scores = vocabulary.metadata.raw(f"{_KEY}scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise _damaged(vocabulary.metadata, "no score for each token")
    usable = {t: i for t, i in vocab.items() if vocabulary.types[i] in (_NORMAL, _USER_DEFINED)}
    ranked = [
        (-scores[token_id], usable[text[:cut]], usable[text[cut:]], text[:cut], text[cut:])
        for text, token_id in usable.items()
        for cut in range(1, len(text))
        if text[:cut] in usable and text[cut:] in usable
    ]
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_tokens(tokenizer: "Tokenizer", vocabulary: Vocabulary) -> None:
    from tokenizers import AddedToken

    special, plain = [], []
    for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (_CONTROL, _UNKNOWN):
            special.append(AddedToken(text, special=True, normalized=False))
        elif kind == _USER_DEFINED and _SPACE not in text:
            plain.append(AddedToken(text, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_template(tokenizer: "Tokenizer", vocabulary: Vocabulary) -> None:
    from tokenizers import processors

    bos = vocabulary.special("bos") if vocabulary.adds_bos else None
    eos = vocabulary.special("eos") if vocabulary.adds_eos else None
    if not bos and not eos:
        return
    single = [*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])]
    pair = [*single, *(part.replace(":0", ":1").replace("$A", "$B") for part in single)]
    ids = [(text, vocabulary.tokens.index(text)) for text in {bos, eos} if text]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=ids
    )


def tokenizer_config(vocabulary: Vocabulary, context: int) -> dict[str, Any]:
    metadata = vocabulary.metadata
    entries = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": vocabulary.adds_bos,
        "add_eos_token": vocabulary.adds_eos,
        "bos_token": vocabulary.special("bos"),
        "eos_token": vocabulary.special("eos"),
        "unk_token": vocabulary.special("unknown"),
        "pad_token": vocabulary.special("padding"),
        "chat_template": metadata.raw("tokenizer.chat_template"),
    }
    return {key: value for key, value in entries.items() if value is not None}


def _damaged(metadata: Metadata, what: str) -> StoreError:
    return StoreError(f"{metadata.path} is damaged, its tokenizer has {what}; download it again.")
