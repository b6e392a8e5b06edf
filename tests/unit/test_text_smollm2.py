"""The real model's tokenizer and chat template, held against `transformers`."""

from pathlib import Path
from typing import Any

import pytest

from baton.store import resolve
from router.text import Detokenizer, TextModel, load_text_model

pytestmark = pytest.mark.model

TEXTS = [
    "Hello, world!",
    "naïve café — 東京 👩‍👩‍👧‍👦",
    "  two\n\n\tspaces  ",
    "a<|im_end|>b",
    "😀" * 20,
]
CONVERSATIONS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "世界 😀"}],
    [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "B"},
    ],
]


@pytest.fixture(scope="module")
def directory() -> Path:
    return resolve("smollm2").path


@pytest.fixture(scope="module")
def model(directory: Path) -> TextModel:
    return load_text_model("smollm2", directory, "f")


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


async def test_conversations_become_the_same_ids(model: TextModel, reference: Any) -> None:
    for messages in CONVERSATIONS:
        expected = reference.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        assert await model.encode_chat(messages) == expected["input_ids"]


async def test_prompts_become_the_same_ids(model: TextModel, reference: Any) -> None:
    for text in TEXTS:
        assert await model.encode_prompt(text) == reference(text)["input_ids"]


async def test_text_built_token_by_token_is_the_text_decoded_at_once(
    model: TextModel, reference: Any
) -> None:
    for text in TEXTS:
        token_ids = await model.encode_prompt(text)
        detokenizer = Detokenizer(model.tokenizer.table)
        pieces = [detokenizer.push(token_id) for token_id in token_ids]
        assert not any("\ufffd" in piece for piece in pieces)
        built = "".join(pieces) + detokenizer.flush()
        assert built == reference.decode(token_ids, skip_special_tokens=True)
