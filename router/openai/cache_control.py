"""`cache_control`: which beginnings of a prompt are to stay cached, and for how long.

On a part of a message it marks the prompt up to the end of that part, on a message the end of
its content, on the body the whole prompt. Terms of the Anthropic API:
https://docs.anthropic.com/en/docs/build-with-claude/prompt-caching
"""

import re
from typing import Any, NamedTuple

MOST_MARKS = 4
MOST_SECONDS = 24 * 3600
DEFAULT_TTL_S = 300
_UNITS = {"s": 1, "m": 60, "h": 3600}


class Mark(NamedTuple):
    """A place in the content of a message, in characters."""

    message: int
    offset: int
    ttl_s: int


def parse_cache_control(value: Any, place: str = "") -> int | None:
    """Seconds; None for none. A ValueError's text begins with `place`."""
    if value is None:
        return None
    if not isinstance(value, dict) or set(value) - {"type", "ttl"}:
        raise ValueError(f'{place} must be an object such as {{"type": "ephemeral", "ttl": "5m"}}')
    if value.get("type") != "ephemeral":
        raise ValueError(f'{place}.type must be "ephemeral"')
    return parse_ttl(value.get("ttl"), f"{place}.ttl")


def parse_ttl(value: Any, place: str) -> int:
    if value is None:
        return DEFAULT_TTL_S
    match = re.fullmatch(r"([0-9]{1,6})([smh])", value) if isinstance(value, str) else None
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 1 <= seconds <= MOST_SECONDS:
        raise ValueError(f'{place} must be a time such as "5m" or "1h", at most "24h"')
    return seconds


def take_marks(messages: list[dict[str, Any]]) -> list[Mark]:
    """The marks of parsed messages, in order; takes them out of the messages."""
    return [
        Mark(index, offset, ttl_s)
        for index, message in enumerate(messages)
        for offset, ttl_s in message.pop("cache_control", ())
    ]
