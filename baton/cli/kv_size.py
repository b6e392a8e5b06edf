"""`baton kv-size`: how large a KV cache is, with the formula and its numbers.

KV bytes = 2 · L · tokens · n_kv · d_h · bytes. Pure arithmetic in `KVShape`; reads a model's
config.json when one is named. Imports no torch.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.cluster.errors import SettingsError
from baton.cluster.values import format_size, parse_size

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8": 1, "int8": 1}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8"}
_PARAM_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class KVShape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    bytes_per_value: int

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_value

    def bytes_for(self, tokens: int) -> int:
        return tokens * self.bytes_per_token

    def tokens_in(self, num_bytes: int) -> int:
        return num_bytes // self.bytes_per_token


@dataclass(frozen=True)
class Question:
    """The command's arguments as given."""

    model: str | None
    layers: int | None
    kv_heads: int | None
    head_dim: int | None
    dtype: str
    tokens: int
    params: str | None
    memory: str


def kv_size(question: Question) -> None:
    Console(highlight=False, soft_wrap=True).print(*answer(question), sep="\n")


def answer(question: Question) -> list[str]:
    """The lines to print."""
    shape, weight_bytes = _shape(question)
    tokens, memory = question.tokens, _memory(question.memory)
    one = shape.bytes_for(tokens)
    lines = [
        "KV bytes = 2 · layers · tokens · kv heads · head dim · bytes per value",
        f"  one token        2 · {shape.num_layers} · 1 · {shape.num_kv_heads} · {shape.head_dim}"
        f" · {shape.bytes_per_value} = {shape.bytes_per_token:,} B",
        f"  {tokens:,} tokens".ljust(19) + f"{one:,} B = {decimal(one)} ({format_size(one)})",
        f"  in {format_size(memory)}".ljust(19) + f"{memory // one:,} sequences of {tokens:,} "
        f"tokens, or {shape.tokens_in(memory):,} tokens in all",
    ]
    if weight_bytes is not None:
        lines.append(
            f"  weights          {decimal(weight_bytes)}: the cache outgrows them beyond "
            f"{shape.tokens_in(weight_bytes):,} tokens"
        )
    return lines


def decimal(num_bytes: float) -> str:
    """Powers of ten, as papers and vendors count."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def _shape(question: Question) -> tuple[KVShape, int | None]:
    dtype = _SHORT.get(question.dtype, question.dtype)
    if dtype not in DTYPE_BYTES:
        names = ", ".join((*DTYPE_BYTES, *_SHORT))
        raise SettingsError(f"--dtype must be one of {names}, not {question.dtype!r}.")
    given = (question.layers, question.kv_heads, question.head_dim)
    params = None if question.params is None else parse_params(question.params)
    if question.model is None and None not in given:
        layers, kv_heads, head_dim = (value or 0 for value in given)
        shape = KVShape(layers, kv_heads, head_dim, DTYPE_BYTES[dtype])
        return shape, None if params is None else params * shape.bytes_per_value
    if question.model is None and any(value is not None for value in given):
        raise SettingsError("Give all of --layers, --kv-heads and --head-dim, or a MODEL.")
    path = _model_folder(question.model or "smollm2")
    shape = _with_given(shape_of(_read_config(path), DTYPE_BYTES[dtype]), question)
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return shape, params * shape.bytes_per_value if params is not None else weights or None


def _with_given(shape: KVShape, question: Question) -> KVShape:
    return KVShape(
        question.layers or shape.num_layers,
        question.kv_heads or shape.num_kv_heads,
        question.head_dim or shape.head_dim,
        shape.bytes_per_value,
    )


def shape_of(config: dict[str, Any], bytes_per_value: int) -> KVShape:
    """From a Hugging Face config.json."""
    try:
        heads = int(config["num_attention_heads"])
        head_dim = config.get("head_dim") or int(config["hidden_size"]) // heads
        kv_heads = config.get("num_key_value_heads") or heads
        return KVShape(
            int(config["num_hidden_layers"]), int(kv_heads), int(head_dim), bytes_per_value
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise SettingsError(
            f"The model's config.json does not tell the shape of its cache ({error!r}); "
            "give --layers, --kv-heads and --head-dim."
        ) from error


def _model_folder(model: str) -> Path:
    if (Path(model) / "config.json").is_file():
        return Path(model)
    from baton.store import StoreError, resolve

    try:
        return resolve(model).path
    except StoreError as error:
        raise SettingsError(str(error)) from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((path / "config.json").read_text())
        return config
    except (OSError, ValueError) as error:
        raise SettingsError(f"Cannot read {path / 'config.json'}: {error}") from error


def _memory(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise SettingsError(f"--memory must be {error}, not {text!r}.") from error


def parse_params(text: str) -> int:
    """135000000 of "135M"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.strip().upper())
    if match is None:
        raise SettingsError(f"--params must be a number such as 135M or 70B, not {text!r}.")
    return int(float(match[1]) * _PARAM_UNITS[match[2]])
