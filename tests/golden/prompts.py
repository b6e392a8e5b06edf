"""The prompts of the golden tests: varied text, and lengths around every border.

More come from the folder that BATON_PROMPTS names, when it is set (MT-bench, HumanEval and
GSM8K as JSON lines).
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = 16
CHUNK = 64
PER_FILE = 4


@dataclass(frozen=True)
class GoldenPrompt:
    """Text, token ids or a conversation, and how to ask for it."""

    name: str
    content: str | list[int] | list[dict[str, str]]

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.content, str) and isinstance(self.content[0], dict)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    @property
    def body(self) -> dict[str, Any]:
        if self.is_chat:
            return {"messages": self.content, "logprobs": True}
        return {"prompt": self.content, "logprobs": 0}


TEXTS = {
    "fact": "The capital of France is",
    "story": "Once upon a time, in a village at the edge of a dark forest, there lived a",
    "science": "Photosynthesis is the process by which plants convert light into energy. It",
    "one word": "Hello",
    "one letter": "a",
    "spaces": "   leading spaces and\ttabs\t\tand\n\n\nblank lines   ",
    "python": "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "javascript": "const sum = (numbers) => numbers.reduce((total, x) =>",
    "sql": "SELECT name, COUNT(*) FROM orders JOIN customers ON orders.customer_id =",
    "json": '{"name": "Ada", "languages": ["Python", "C"], "address": {"city":',
    "html": "<html>\n<head><title>Test page</title></head>\n<body>\n<h1>",
    "list": "Shopping list:\n1. Apples\n2. Bread\n3. Cheese\n4.",
    "table": "| Planet | Moons |\n|---|---|\n| Earth | 1 |\n| Mars | 2 |\n| Jupiter |",
    "numbers": "1, 1, 2, 3, 5, 8, 13, 21,",
    "german": "Die Würde des Menschen ist unantastbar. Sie zu achten und zu schützen ist",
    "french": "Il était une fois une petite fille qui s'appelait Élodie et qui",
    "chinese": "北京是中国的首都，",
    "russian": "Москва — столица России, а Париж —",
    "arabic": "اللغة العربية هي",
    "emoji": "Weather today: ☀️🌧️🌈 and my mood is 😀👍🏽👩‍👩‍👧‍👦",
    "combining": "e\u0301 a\u0308 \u200bzero\u200bwidth \ufeffmark",
    "repeat": "the cat sat on the mat " * 12 + "and then",
    "long": "A river carries water from the mountains to the sea. Along its way it turns mills, "
    "feeds fields, floods cellars and moves borders. People settle near it because it is a road "
    "that needs no paving, and they leave when it changes its bed. In the following paragraphs we "
    "look at three rivers and at what they did to the towns beside them. " * 2,
}

SYSTEM = {"role": "system", "content": "You are a terse assistant who answers in one sentence."}
CHATS = {
    "greeting": ["Hi there!"],
    "question": ["Why is the sky blue?"],
    "maths": ["What is 17 times 23? Think step by step."],
    "code": ["Write a Python function that reverses a string."],
    "poem": ["Write a haiku about the sea."],
    "translate": ["Translate to Spanish: 'Where is the library?'"],
    "emoji": ["What does 🦀 mean? And 🐍? Answer with emoji 🙂"],
    "cjk": ["日本の首都はどこですか？"],
    "turns": ["My name is Ada.", "Nice to meet you, Ada!", "What is my name?"],
    "long turns": [
        "I plan a trip to Norway in June.",
        "Great choice! June has long days and mild weather. Would you like tips for fjords?",
        "Yes, and please keep it cheap.",
        "Take the public ferries, camp under the right to roam, and cook for yourself.",
        "List three fjords that I should see.",
    ],
}

# Prompts of these many tokens: around blocks, around prefill chunks, over several chunks.
LENGTHS = (
    *(1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK),
    *(CHUNK - 1, CHUNK, CHUNK + 1),
    *(8 * BLOCK - 1, 8 * BLOCK, 8 * BLOCK + 1, 3 * CHUNK + 7),
)


def golden_prompts(ids_of: Any) -> list[GoldenPrompt]:
    """All of them; `ids_of` is a tokenizer, for the prompts given as token ids."""
    prompts = [GoldenPrompt(name, text) for name, text in TEXTS.items()]
    for name, turns in CHATS.items():
        prompts.append(GoldenPrompt(f"chat {name}", conversation(*turns)))
    prompts.append(GoldenPrompt("chat system", [SYSTEM, *conversation("What is a prime?")]))
    prompts.append(GoldenPrompt("chat same system", [SYSTEM, *conversation("What is a graph?")]))
    # Each its own beginning: one that another prompt has made warm would test nothing cold.
    for i, length in enumerate(LENGTHS):
        prompts.append(GoldenPrompt(f"{length} ids", ids_of(f"{i}. {TEXTS['long']}")[:length]))
    return prompts + list(_from_folder(os.environ.get("BATON_PROMPTS")))


def conversation(*turns: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def _from_folder(folder: str | None) -> Iterator[GoldenPrompt]:
    if folder is None:
        return
    for row in _rows(folder, "mt_bench_questions.jsonl"):
        yield GoldenPrompt(f"mt-bench {row['question_id']}", conversation(row["turns"][0]))
    for row in _rows(folder, "humaneval.jsonl"):
        yield GoldenPrompt(row["task_id"], row["prompt"])
    for i, row in enumerate(_rows(folder, "gsm8k_test.jsonl")):
        yield GoldenPrompt(f"gsm8k {i}", f"Question: {row['question']}\nAnswer:")


def _rows(folder: str, name: str) -> list[Any]:
    """A few rows, spread over the file."""
    lines = (Path(folder) / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:: max(1, len(lines) // PER_FILE)][:PER_FILE]]
