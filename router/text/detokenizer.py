"""Incremental detokenising of one choice.

Every token stands for a fixed run of bytes, so text is the UTF-8 decoding of their
concatenation and one token costs the same however long the text already is. Bytes that
only begin a character wait for the rest; U+FFFD stands for bytes that can never be text.
"""

from codecs import utf_8_decode
from collections.abc import Sequence


class Detokenizer:
    __slots__ = ("_table", "_tail")

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._tail = b""

    @property
    def pending(self) -> bool:
        """True while the last bytes only begin a character."""
        return bool(self._tail)

    def push(self, token_id: int) -> str:
        """The characters that this token completes, possibly none."""
        data = self._tail + self._table[token_id] if token_id < len(self._table) else self._tail
        text, used = utf_8_decode(data, "replace", False)
        self._tail = data[used:]
        return text

    def flush(self) -> str:
        """What is left at the end: nothing, or U+FFFD for a character cut short."""
        text, _ = utf_8_decode(self._tail, "replace", True)
        self._tail = b""
        return text
