"""Parsers of request fields whose JSON comes in several shapes.

Each takes the raw JSON value and returns one shape or raises ValueError with the rest of a
sentence that begins with the field's name.
"""

import json
import re
from typing import Any

from router.openai.cache_control import MOST_MARKS, parse_cache_control

MAX_STOPS = 16
MAX_STOP_CHARS = 4096
MAX_PROMPTS = 128
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, Any]
Prompt = str | list[int]


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def parse_stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"may hold at most {MAX_STOPS} strings")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"must hold strings of 1 to {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(stops))


def parse_logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key):
            raise ValueError(f"must have token ids as keys, not {key[:32]!r}")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError("must have numbers as values")
        if not -100 <= bias <= 100:
            raise ValueError("must have values from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


def parse_prompts(value: Any) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a non-empty string, list of strings, or list of token ids")
    if all(is_int(item) for item in value):
        return [value]
    kinds_ok = all(isinstance(item, str) for item in value) or all(
        isinstance(item, list) and all(is_int(token) for token in item) for item in value
    )
    if not kinds_ok:
        raise ValueError("must be a string, a list of strings, token ids, or lists of token ids")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"may hold at most {MAX_PROMPTS} prompts")
    return value


def parse_messages(value: Any) -> list[Message]:
    if value is None or value == []:
        raise ValueError("must not be empty")
    if not isinstance(value, list):
        raise ValueError("must be a list of messages")
    messages = [_parse_message(message, f"[{i}]") for i, message in enumerate(value)]
    if sum(len(message.get("cache_control", ())) for message in messages) > MOST_MARKS:
        raise ValueError(f"may hold at most {MOST_MARKS} cache_control")
    return messages


def _parse_message(message: Any, place: str) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"{place} must be an object")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{place}.role must be one of {', '.join(ROLES)}")
    parsed = {key: field for key, field in message.items() if field is not None}
    content, marks = _parse_content(message.get("content"), f"{place}.content")
    if content is None and role != "assistant":
        raise ValueError(f"{place}.content must not be null")
    parsed["content"] = content or ""
    whole = parse_cache_control(parsed.pop("cache_control", None), f"{place}.cache_control")
    if whole is not None:
        marks.append((len(parsed["content"]), whole))
    if marks:
        parsed["cache_control"] = marks
    if "tool_calls" in parsed:
        parsed["tool_calls"] = _parse_tool_calls(parsed["tool_calls"], f"{place}.tool_calls")
    return parsed


def _parse_content(content: Any, place: str) -> tuple[str | None, list[tuple[int, int]]]:
    """Text parts are joined by newlines: templates of text models take one string. The ends of
    parts that are to stay cached, in characters, each with its seconds."""
    if content is None or isinstance(content, str):
        return content, []
    if not isinstance(content, list):
        raise ValueError(f"{place} must be a string, a list of text parts or null")
    texts: list[str] = []
    marks: list[tuple[int, int]] = []
    for number, part in enumerate(content):
        texts.append(_parse_part(part, place))
        at = f"{place}[{number}].cache_control"
        ttl_s = parse_cache_control(part.get("cache_control"), at)
        if ttl_s is not None:
            marks.append((len("\n".join(texts)), ttl_s))
    return "\n".join(texts), marks


def _parse_part(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise ValueError(f"{place} must hold parts with a type")
    text = part.get("text")
    if kind != "text":
        raise ValueError(f"{place} holds a part of type {kind[:32]!r}; only text is supported")
    if not isinstance(text, str):
        raise ValueError(f"{place} holds a text part without text")
    return text


def _parse_tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Arguments arrive as JSON text; templates expect the object."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{place} must be a list of objects")
    return [_parse_tool_call(call, f"{place}[{i}]") for i, call in enumerate(calls)]


def _parse_tool_call(call: dict[str, Any], place: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{place} must hold a function with a name")
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        arguments = _parse_arguments(arguments, f"{place}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _parse_arguments(text: str, place: str) -> Any:
    """What is no JSON stays text. The body's own parser has no say in what is within a string:
    escapes may make text here that no tokenizer takes."""
    try:
        parsed = json.loads(text)
        if "\\u" in text:
            json.dumps(parsed, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"{place} is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError(f"{place} holds half of a surrogate pair") from None
    except ValueError:
        return text
    return parsed
