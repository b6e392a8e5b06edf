"""Prompt lookup: what followed the last time that these tokens were there (Saxena 2023,
https://github.com/apoorvumang/prompt-lookup-decoding). Plain Python; knows one sequence.
"""

from array import array
from collections.abc import Sequence as ListOf

_REACH = 16_384
"""Tokens looked back over: a search of that many takes some 10 us."""
_WIDTH = array("I").itemsize


class Lookup:
    """`match`: how many of the newest tokens must have been there before."""

    def __init__(self, match: int) -> None:
        self._match = match
        self._text = bytearray()  # the tokens as machine words: `rfind` is a search in C

    def propose(self, token_ids: ListOf[int], count: int) -> list[int]:
        """`count` tokens that may follow `token_ids`, or none. The sequence may only have grown
        since the last call. A repeat that reaches the end goes round in itself."""
        self._text += array("I", token_ids[len(self._text) // _WIDTH :]).tobytes()
        start = self._earlier()
        if start is None:
            return []
        period = len(token_ids) - start
        draft = list(token_ids[start : start + count])
        while len(draft) < count:
            draft.append(draft[-period])
        return draft

    def _earlier(self) -> int | None:
        """The place after the latest earlier occurrence of the newest tokens."""
        size, end = self._match * _WIDTH, len(self._text) - _WIDTH
        first = max(0, end - _REACH * _WIDTH) // _WIDTH * _WIDTH
        newest = self._text[-size:]
        while len(newest) == size and (at := self._text.rfind(newest, first, end)) >= 0:
            if at % _WIDTH == 0:
                return at // _WIDTH + self._match
            end = at + size - 1
        return None
