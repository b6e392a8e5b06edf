"""`cache_control`: how it is written, and which tokens of the prompt it marks."""

from pathlib import Path
from typing import Any

import pytest

from baton.cluster.prefix_index import PromptBlocks
from router.openai.errors import ApiError
from router.openai.fields import parse_messages
from router.openai.prepare import Limits, Prepared, prepare_chat, prepare_completion
from router.openai.schema import ChatBody, CompletionBody, parse
from tests.support.byte_model import byte_model

EPHEMERAL = {"type": "ephemeral"}
LIMITS = Limits(500, 500)


def part(text: str, control: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": text, **({} if control is None else {"cache_control": control})}


def chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    user = {"role": "user", "content": "hi"}
    return {"messages": [{"role": "system", "content": list(parts)}, user], **fields}


@pytest.mark.parametrize(
    ("control", "named"),
    [
        ("ephemeral", "cache_control must be an object"),
        ({}, "cache_control.type"),
        ({"type": "forever"}, "cache_control.type"),
        ({"type": "ephemeral", "ttl": "soon"}, "cache_control.ttl"),
        ({"type": "ephemeral", "ttl": "0s"}, "cache_control.ttl"),
        ({"type": "ephemeral", "ttl": "25h"}, "cache_control.ttl"),
        ({"type": "ephemeral", "ttl": 300}, "cache_control.ttl"),
        ({"type": "ephemeral", "scope": "x"}, "cache_control must be an object"),
    ],
)
def test_a_wrong_cache_control_is_refused_by_its_place(control: Any, named: str) -> None:
    place = f"messages[0].content[1].{named}"
    with pytest.raises(ApiError) as caught:
        parse(ChatBody, chat(part("a"), part("b", control)))
    assert caught.value.status == 400 and caught.value.param == "messages"
    assert caught.value.message.startswith(place)
    with pytest.raises(ApiError) as caught:
        parse(CompletionBody, {"prompt": "x", "cache_control": control})
    assert caught.value.status == 400 and caught.value.param == "cache_control"
    assert caught.value.message.startswith(named)


def test_more_marks_than_four_are_refused() -> None:
    with pytest.raises(ApiError, match="at most 4 cache_control"):
        parse(ChatBody, chat(*[part("a", EPHEMERAL)] * 5))


def test_marks_stand_at_the_ends_of_parts_and_messages() -> None:
    two = {"type": "ephemeral", "ttl": "1h"}
    messages = [
        {"role": "system", "content": [part("ab", EPHEMERAL), part("cd"), part("e", two)]},
        {"role": "user", "content": "xyz", "cache_control": EPHEMERAL},
    ]
    first, second = parse_messages(messages)
    assert (first["content"], first["cache_control"]) == ("ab\ncd\ne", [(2, 300), (7, 3600)])
    assert second["cache_control"] == [(3, 300)]


async def prepared(tmp_path: Path, body: dict[str, Any], template: str | None = None) -> Prepared:
    model = byte_model(tmp_path, template) if template else byte_model(tmp_path)
    return await prepare_chat(parse(ChatBody, body), model, LIMITS)


async def test_a_part_marks_the_rendered_prompt_up_to_its_end(tmp_path: Path) -> None:
    body = chat(part("long text", EPHEMERAL), part("more", {"type": "ephemeral", "ttl": "10s"}))
    marked = await prepared(tmp_path, body)
    plain = await prepared(tmp_path, chat(part("long text"), part("more")))
    assert marked.prompts == plain.prompts, "marks must not change the prompt"
    start = len("system\n") + 1  # <|im_start|> is one token
    assert marked.pins == [[(start + 9, 300), (start + 14, 10)]]
    assert plain.pins == [[]]


async def test_the_mark_of_the_body_is_the_whole_prompt(tmp_path: Path) -> None:
    marked = await prepared(tmp_path, chat(part("a"), cache_control=EPHEMERAL))
    assert marked.pins == [[(len(marked.prompts[0]), 300)]]
    body = parse(CompletionBody, {"prompt": ["abc", "de"], "cache_control": EPHEMERAL})
    completion = await prepare_completion(body, byte_model(tmp_path), LIMITS)
    assert completion.pins == [[(3, 300)], [(2, 300)]]


async def test_a_template_that_trims_still_shows_the_place(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}"
    marked = await prepared(tmp_path, chat(part("abc", EPHEMERAL), part("d")), template)
    assert marked.pins == [[(4, 300)]]


async def test_a_template_that_shows_contents_twice_marks_nothing(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m['content'] }}{{ m['content'] }}]{% endfor %}"
    marked = await prepared(tmp_path, chat(part("abc", EPHEMERAL)), template)
    assert marked.pins == [[]]


def test_one_key_keeps_prompts_together_that_begin_differently() -> None:
    def affinity(token: int, key: str = "", salt: str = "") -> bytes:
        return PromptBlocks([token] * 80, salt, key).affinity

    assert affinity(1) != affinity(2)
    assert affinity(1, "k") == affinity(2, "k") != affinity(2, "other")
    assert affinity(1, "k") != affinity(1, "k", salt="s")
