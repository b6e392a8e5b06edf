"""Chat templates render in a sandbox with bounded output and say clearly what they refuse."""

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

from router.text import ChatTemplate, TemplateError, load_text_model
from tests.support.byte_model import TEMPLATE, byte_model, write_byte_model

USER = {"role": "user", "content": "hi"}


def render(source: str, *messages: dict[str, object], **kwargs: int) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages or (USER,), **kwargs)


def test_messages_special_tokens_and_the_generation_prompt_reach_the_template() -> None:
    source = "{{ bos_token }}{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    source += "{% if add_generation_prompt %}>{% endif %}"
    assert render(source) == "<s>[user:hi]>"


def test_blocks_are_trimmed_as_templates_expect() -> None:
    assert render("{% if true %}\n  {% set x = 1 %}\nA{% endif %}") == "A"


def test_what_a_template_raises_is_told_to_the_client() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_template_that_stumbles_over_the_messages_is_a_clear_refusal() -> None:
    with pytest.raises(TemplateError, match="refuses these messages"):
        render("{{ messages[0].content + 1 }}")


def test_values_that_are_nested_too_deeply_for_a_template_are_a_clear_refusal() -> None:
    """The RecursionError was an internal error to the client."""
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(TemplateError, match="refuses these messages"):
        render("{{ messages[0] | tojson }}", {**USER, "extra": value})


def test_a_template_cannot_reach_the_interpreter() -> None:
    with pytest.raises(TemplateError, match="unsafe"):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}")


def test_a_template_cannot_change_the_messages() -> None:
    with pytest.raises(TemplateError, match="unsafe"):
        render("{{ messages.append(1) }}")


def test_output_is_bounded() -> None:
    source = (
        "{% for i in range(90000) %}{% for j in range(90000) %}xxxxxxxx{% endfor %}{% endfor %}"
    )
    with pytest.raises(TemplateError, match="too long"):
        render(source, max_chars=10_000)


def test_tojson_keeps_text_readable_and_strftime_now_gives_a_date() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "hi"}'
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_generation_markers_and_loop_controls_are_understood() -> None:
    source = "{% generation %}a{% endgeneration %}{% for i in [1, 2] %}{% break %}{% endfor %}"
    assert render(source) == "a"


def test_developer_becomes_system_where_the_template_does_not_know_it() -> None:
    developer = {"role": "developer", "content": "x"}
    assert render("{{ messages[0].role }}", developer) == "system"
    assert render("{# developer #}{{ messages[0].role }}", developer) == "developer"


def test_a_damaged_template_is_refused_when_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="damaged"):
        byte_model(tmp_path, "{% for %}")


def test_a_template_in_its_own_file_wins_over_the_configuration(tmp_path: Path) -> None:
    write_byte_model(tmp_path, TEMPLATE)
    (tmp_path / "chat_template.jinja").write_text("own file")
    model = load_text_model("m", tmp_path, "f")
    assert model.template is not None
    assert model.template.render([USER]) == "own file"


async def test_long_texts_are_tokenised_to_the_same_ids_off_the_event_loop(tmp_path: Path) -> None:
    model = byte_model(tmp_path)
    text = "hello world " * 2000
    assert await model.encode_prompt(text) == model.tokenizer.encode(text, True)
    model.close()


@pytest.mark.parametrize(
    ("fields", "inline"),
    [
        ({"content": "x" * 1000}, True),
        ({"content": "x" * 5000}, False),
        ({"content": "", "tool_calls": [{"function": {"arguments": {"a": ["x" * 5000]}}}]}, False),
        ({"content": "", "extra": [0] * 5000}, False),
        ({"content": "", "extra": {"x" * 5000: None}}, False),
    ],
)
async def test_messages_are_rendered_off_the_event_loop_when_any_of_their_fields_is_long(
    tmp_path: Path, fields: dict[str, object], inline: bool
) -> None:
    """Only content counted, so megabytes of tool calls stopped all streams."""
    threads = []

    class Watched(ChatTemplate):
        def render(self, *args: Any, **kwargs: Any) -> str:
            threads.append(threading.get_ident())
            return super().render(*args, **kwargs)

    model = dataclasses.replace(byte_model(tmp_path), template=Watched(TEMPLATE, {}))
    await model.encode_chat([{"role": "user", **fields}])
    model.close()
    assert (threads == [threading.get_ident()]) is inline
