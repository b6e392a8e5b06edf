"""Where places in the contents of messages come to lie in the rendered prompt.

A template may wrap, trim or reorder what it is given, so it is asked: the messages are rendered
again with a token that nobody can have written at each place.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
Place = tuple[int, int]
"""Number of a message, and characters of its content before the place."""


def places_in(
    render: Callable[[Messages], str], messages: Messages, places: Sequence[Place], text: str
) -> list[int | None]:
    """Characters of `text`, the rendered messages, before each place; None for all when the
    template does more with the contents than to show them once."""
    secret = secrets.token_hex(8)
    marked = [dict(message) for message in messages]
    for number, (index, offset) in sorted(enumerate(places), key=lambda p: p[1], reverse=True):
        content = marked[index]["content"]
        marked[index]["content"] = f"{content[:offset]}\ue000{secret}:{number};{content[offset:]}"
    pieces = re.split(f"\ue000{secret}:(\\d+);", render(marked))
    numbers, shown = [int(number) for number in pieces[1::2]], pieces[::2]
    if sorted(numbers) != list(range(len(places))) or "".join(shown) != text:
        return [None] * len(places)
    found: list[int | None] = [None] * len(places)
    end = 0
    for number, piece in zip(numbers, shown, strict=False):
        end += len(piece)
        found[number] = end
    return found
