"""Everything the gateway knows of the model: tokenizer, chat template, context, vocabulary.

Loaded once from a model directory. Tokenising of long prompts runs on the model's own small
thread pool so that the event loop goes on serving others.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson

from router.text.marks import Place, places_in
from router.text.template import ChatTemplate, TemplateError
from router.text.tokenizer import Tokenizer

T = TypeVar("T")

# Shorter texts are tokenised in well under a millisecond, less than a thread hop is worth.
INLINE_CHARS = 4096
# What rendering a value costs besides its text, in characters.
VALUE_CHARS = 64


@dataclass(frozen=True)
class TextModel:
    name: str
    fingerprint: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    vocab_size: int
    max_model_len: int
    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="tokenise")
    )

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a rendered conversation; raises TemplateError."""
        return await self._run(_size(messages), lambda: self._encode_chat(messages))

    async def encode_marked_chat(
        self, messages: Sequence[Mapping[str, Any]], places: Sequence[Place]
    ) -> tuple[list[int], list[int]]:
        """As `encode_chat`, and how many of the leading ids belong to what precedes each place; 0
        where that cannot be told. Raises TemplateError."""
        return await self._run(
            _size(messages) * (1 + len(places)), lambda: self._encode_marked(messages, places)
        )

    async def encode_prompt(self, text: str) -> list[int]:
        """The ids of a plain prompt, with what the tokenizer puts around it."""
        return await self._run(len(text), lambda: self.tokenizer.encode(text, True))

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)

    def _encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if self.template is None:
            raise TemplateError("this model has no chat template; use /v1/completions")
        return self.tokenizer.encode(self.template.render(messages), False)

    def _encode_marked(
        self, messages: Sequence[Mapping[str, Any]], places: Sequence[Place]
    ) -> tuple[list[int], list[int]]:
        token_ids = self._encode_chat(messages)
        assert self.template is not None
        render = self.template.render
        text = render(messages)
        ends = places_in(render, messages, places, text)
        before = [self.tokenizer.encode(text[:end], False) if end else [] for end in ends]
        return token_ids, [_num_common(token_ids, ids) for ids in before]

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)


def _size(messages: Sequence[Mapping[str, Any]]) -> int:
    """Characters a template may render, all fields at all depths; counts no further than it takes
    to know that they are many."""
    size, left = 0, list[Any](messages)
    while left and size <= INLINE_CHARS:
        value = left.pop()
        if isinstance(value, str):
            size += len(value)
            continue
        size += VALUE_CHARS
        if isinstance(value, Mapping):
            left += value
            left += value.values()
        elif isinstance(value, list):
            left += value
    return size


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Equal leading tokens."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def load_text_model(name: str, directory: Path, fingerprint: str) -> TextModel:
    """Reads a model directory; raises UnsupportedTokenizer or TemplateError."""
    tokenizer = Tokenizer.load(directory)
    config = _read_json(directory / "config.json")
    tokenizer_config = _read_json(directory / "tokenizer_config.json")
    source = _template_source(directory, tokenizer_config)
    special = _special_tokens(tokenizer_config)
    return TextModel(
        name=name,
        fingerprint=fingerprint,
        tokenizer=tokenizer,
        template=None if source is None else ChatTemplate(source, special),
        vocab_size=int(config.get("vocab_size") or tokenizer.size),
        max_model_len=int(config.get("max_position_embeddings") or config.get("n_ctx") or 2048),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = orjson.loads(path.read_bytes())
    return content if isinstance(content, dict) else {}


def _template_source(directory: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """Its own file when there is one, else inside the tokenizer's configuration."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    source = tokenizer_config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        return named.get("default")
    return source


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = tokenizer_config.get(key)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[key] = content
    return tokens
