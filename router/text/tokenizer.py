"""The model's tokenizer: text to ids, and the bytes that each id stands for.

Covers the byte-level BPE family (GPT-2, Llama 3, Qwen, SmolLM) and the SentencePiece family
("▁" for a space, <0x0A> for a raw byte). Special tokens stand for no text. Invariant:
concatenated bytes of a text's ids, decoded as UTF-8, are the text.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import tokenizers

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedTokenizer(Exception):
    """The tokenizer file is missing, damaged or of a family without a byte table."""


class Tokenizer:
    def __init__(self, backend: tokenizers.Tokenizer, description: dict[str, Any]) -> None:
        self._backend = backend
        added = description.get("added_tokens") or []
        self.special_ids = frozenset(token["id"] for token in added if token.get("special"))
        self._names = {token["id"]: token["content"] for token in added}
        to_bytes = _byte_converter(description.get("decoder"))
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.table: list[bytes] = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for name, token_id in vocabulary.items():
            self.table[token_id] = to_bytes(name)
        for token_id, name in self._names.items():
            self.table[token_id] = b"" if token_id in self.special_ids else name.encode()

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        path = directory / "tokenizer.json"
        try:
            raw = path.read_bytes()
            return cls(tokenizers.Tokenizer.from_buffer(raw), orjson.loads(raw))
        except OSError as error:
            raise UnsupportedTokenizer(f"cannot read {path}: {error.strerror}") from error
        except UnsupportedTokenizer:
            raise
        except Exception as error:  # the backend raises bare Exception for a malformed file
            raise UnsupportedTokenizer(f"{path} is not a valid tokenizer: {error}") from error

    @property
    def size(self) -> int:
        return len(self.table)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Iterable[int]) -> str:
        size = len(self.table)
        data = b"".join(self.table[i] for i in token_ids if i < size)
        return data.decode("utf-8", "replace")

    def shown_bytes(self, token_id: int) -> bytes:
        """The token's bytes as logprobs show them; special tokens show their name."""
        if token_id in self._names:
            return self._names[token_id].encode()
        return self.table[token_id] if token_id < len(self.table) else b""


def _byte_converter(decoder: dict[str, Any] | None) -> Any:
    kinds = _decoder_kinds(decoder)
    if "ByteLevel" in kinds:
        return _byte_level
    if "Metaspace" in kinds or "ByteFallback" in kinds or "Replace" in kinds:
        return _sentencepiece
    found = ", ".join(sorted(kinds)) or "none"
    raise UnsupportedTokenizer(
        f"the tokenizer's decoder ({found}) is not supported: "
        "use a model with a byte-level BPE or SentencePiece tokenizer"
    )


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if not decoder:
        return set()
    if decoder.get("type") == "Sequence":
        return {kind for part in decoder.get("decoders", []) for kind in _decoder_kinds(part)}
    return {decoder.get("type", "")}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's mapping of the 256 bytes to printable characters, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


BYTE_OF_CHAR = _byte_alphabet()


def _byte_level(name: str) -> bytes:
    try:
        return bytes(BYTE_OF_CHAR[char] for char in name)
    except KeyError:
        return name.encode()


def _sentencepiece(name: str) -> bytes:
    if match := BYTE_TOKEN.fullmatch(name):
        return bytes([int(match[1], 16)])
    return name.replace("▁", " ").encode()
