"""How `--speculate` is written: off, ngram, ngram(match=3, tokens=8), draft(MODEL, tokens=4).

Both sides use it; pure. A ValueError's text says what is wrong with which part.
"""

import re
from dataclasses import dataclass
from typing import Literal

MOST_TOKENS = 64
_CALL = re.compile(r"\s*(\w+)\s*(?:\((.*)\))?\s*")


@dataclass(frozen=True)
class Speculation:
    """`tokens`: most that are drafted at once. `match`: newest tokens that must have been in the
    text before (ngram). `model`: the one that drafts (draft)."""

    kind: Literal["ngram", "draft"]
    tokens: int
    match: int = 0
    model: str = ""


def parse_speculation(text: str) -> Speculation | None:
    """None for "off"."""
    found = _CALL.fullmatch(text)
    kind, inside = found.groups() if found else ("", None)
    arguments = [part.strip() for part in inside.split(",")] if inside else []
    if kind == "off" and inside is None:
        return None
    if kind == "ngram":
        numbers = _numbers(arguments, {"match": 3, "tokens": 8})
        return Speculation("ngram", numbers["tokens"], match=numbers["match"])
    if kind == "draft" and arguments and "=" not in arguments[0]:
        model, *rest = arguments
        return Speculation("draft", _numbers(rest, {"tokens": 4})["tokens"], model=model)
    raise ValueError(f"{text!r} is not off, ngram, ngram(match=3, tokens=8) or draft(MODEL)")


def _numbers(arguments: list[str], values: dict[str, int]) -> dict[str, int]:
    for argument in arguments:
        name, _, value = (part.strip() for part in argument.partition("="))
        if name not in values:
            raise ValueError(f"{name!r} is not one of {', '.join(values)}")
        if not value.isdecimal() or not 1 <= int(value) <= MOST_TOKENS:
            raise ValueError(
                f"{name} must be a whole number from 1 to {MOST_TOKENS}, not {value!r}"
            )
        values[name] = int(value)
    return values
