"""Chat templates: messages to the prompt text of one model.

A template comes with the model and is not trusted: it runs in Jinja's immutable sandbox and
its output is bounded. What a template raises with `raise_exception` is a message for the
client ("roles must alternate"), and so is a template that stumbles over the messages.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_OUTPUT_CHARS = 32 << 20
_STUMBLES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class TemplateError(Exception):
    """The template cannot render these messages; the text is fit for the client."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant turns for training; here it only passes through."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        self.knows_developer = "developer" in source
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template is damaged: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], max_chars: int = MAX_OUTPUT_CHARS
    ) -> str:
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=[self._adapt(message) for message in messages],
                add_generation_prompt=True,
                **self._special_tokens,
            ):
                pieces.append(piece)
                size += len(piece)
                if size > max_chars:
                    raise TemplateError("the rendered prompt is too long")
        except _STUMBLES as error:
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from (
                error
            )
        return "".join(pieces)

    def _adapt(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Most templates know no developer role; it is today's name for system."""
        if message["role"] == "developer" and not self.knows_developer:
            return {**message, "role": "system"}
        return message
