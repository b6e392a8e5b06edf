"""`baton kv-size`: how large a KV cache is, with the formula and its numbers.

The arithmetic is the engine's own (`KVLayout`); here it is asked and shown. Reads a model's
config.json when one is named. Imports no torch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from baton.cluster.errors import SettingsError
from baton.cluster.values import format_size, parse_size
from baton.engine.kv_layout import DTYPE_BYTES, KVLayout, kv_dtype
from baton.engine.model_config import ModelConfig
from baton.kv_policy import FULL, KVPolicy, parse_policy

_DTYPES = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "bfloat16",  # as many bytes
    "fp16": "bfloat16",
    "float32": "float32",
    "fp32": "float32",
}
_KINDS = ("auto", "fp8", "int8", "int4")
_PARAM_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Question:
    """The command's arguments as given."""

    model: str | None = None
    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    latent: int | None = None
    window: int | None = None
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"
    kv_policy: str = "full"
    block_size: int = 16
    tokens: int = 4096
    params: str | None = None
    memory: str = "512MiB"


@dataclass(frozen=True)
class CacheShape:
    """`window`: tokens that a token sees at most, None if some layer sees them all.
    `num_heads`: query heads, if known. `policy`: what is kept of a prompt."""

    layout: KVLayout
    window: int | None = None
    num_heads: int | None = None
    policy: KVPolicy = FULL

    def bytes_for(self, tokens: int) -> int:
        """Of one sequence of so many tokens. A quantized one holds whole blocks and its tail."""
        held = min(tokens, self.most_held(tokens))
        states = self.policy.num_states(tokens)
        if self.layout.quantized is None and not states:
            return held * self.layout.bytes_per_token
        blocks = -(-held // self.layout.block_size) + self.layout.num_tail_blocks
        return (blocks - -states // self.layout.states_per_block) * self.layout.bytes_per_block

    def most_held(self, tokens: int) -> int:
        """Tokens whose blocks are kept: those of the window, to whole blocks, and of a prompt what
        the policy keeps."""
        if not self.policy.is_full:
            return self.policy.kept_in_step(tokens, tokens, self.layout.block_size)
        if self.window is None:
            return tokens
        return (-(-self.window // self.layout.block_size) + 1) * self.layout.block_size

    def tokens_in(self, num_bytes: int) -> int:
        """Without windows and tails."""
        return num_bytes * self.layout.block_size // self.layout.bytes_per_block


def kv_size(question: Question) -> None:
    Console(highlight=False, soft_wrap=True).print(*answer(question), sep="\n")


def answer(question: Question) -> list[str]:
    """The lines to print."""
    shape, weight_bytes = _shape(question)
    shape = replace(shape, policy=_policy(question.kv_policy))
    if shape.policy.keeps_state and shape.layout.quantized is not None:
        raise SettingsError("--kv-policy h2o does not go with --kv-dtype.")
    tokens, memory = question.tokens, _memory(question.memory)
    one = shape.bytes_for(tokens)
    lines = [
        *_formula(shape.layout),
        *_notes(shape, tokens),
        _line(f"{tokens:,} tokens", f"{one:,} B = {decimal(one)} ({format_size(one)})"),
        _line(
            f"in {format_size(memory)}",
            f"{memory // one:,} sequences of {tokens:,} tokens, or "
            f"{shape.tokens_in(memory):,} tokens in all",
        ),
    ]
    if weight_bytes is not None:
        beyond = shape.tokens_in(weight_bytes)
        outgrows = f"the cache outgrows them beyond {beyond:,} tokens"
        lines.append(_line("weights", f"{decimal(weight_bytes)}: {outgrows}"))
    return lines


def _formula(layout: KVLayout) -> Iterator[str]:
    layers, heads, dim = layout.num_layers, layout.num_kv_heads, layout.head_dim
    if layout.quantized is not None:
        sizes = layout.quantized
        *scales, keys, values = sizes.parts
        padding = sizes.row_bytes - sum(sizes.parts)
        yield "KV bytes = layers · blocks · (keys + values + scales and zero points of a block)"
        yield _line(
            f"one block of {layout.block_size}",
            f"{keys:,} + {values:,} + {sum(scales) + padding:,} = {sizes.row_bytes:,} B per layer",
        )
        plain = replace(layout, dtype=layout.compute_dtype)
        share = layout.bytes_per_block / plain.bytes_per_block
        yield _line(
            "one token",
            f"{layers} · {sizes.row_bytes:,} / {layout.block_size} = {layout.bytes_per_token:,} B, "
            f"{share:.3f} of {layout.compute_dtype}",
        )
        return
    size = DTYPE_BYTES[layout.dtype]
    if layout.num_planes == 1:
        yield "KV bytes = layers · tokens · latent and rotary values · bytes per value"
        product = f"{layers} · 1 · {dim} · {size}"
    else:
        yield "KV bytes = 2 · layers · tokens · kv heads · head dim · bytes per value"
        product = f"2 · {layers} · 1 · {heads} · {dim} · {size}"
    yield _line("one token", f"{product} = {layout.bytes_per_token:,} B")


def _notes(shape: CacheShape, tokens: int) -> Iterator[str]:
    layout, heads = shape.layout, shape.num_heads
    if "latent" in layout.layer_kinds:
        yield _line("latent", f"{layout.head_dim} values per layer and token, whatever the heads")
    elif heads is not None and heads > layout.num_kv_heads:
        times = heads / layout.num_kv_heads
        yield _line("grouped heads", f"{times:g}x below {heads} heads with KV of their own")
    if layout.num_tail_blocks:
        tail = layout.num_tail_blocks * layout.bytes_per_block
        newest = f"{layout.num_tail_blocks} blocks more per sequence, {decimal(tail)}"
        yield _line("newest tokens", newest)
    if not shape.policy.is_full:
        states = shape.policy.num_states(tokens)
        held = f"{shape.policy}: {shape.most_held(tokens):,} of {tokens:,} tokens are kept"
        yield _line("policy", held + (f", with the states of {states:,}" if states else ""))
    elif shape.window is not None and shape.most_held(tokens) < tokens:
        held = f"{shape.window:,}: at most {shape.most_held(tokens):,} tokens are kept"
        yield _line("window", held)


def _line(name: str, text: str) -> str:
    return f"  {name:<17}{text}" if len(name) < 17 else f"  {name} {text}"


def decimal(num_bytes: float) -> str:
    """Powers of ten, as papers and vendors count."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def _shape(question: Question) -> tuple[CacheShape, int | None]:
    """The cache asked for, and the bytes of the weights if they are known."""
    dtype = _dtype(question)
    params = None if question.params is None else parse_params(question.params)
    if _is_given(question):
        weights = None if params is None else params * DTYPE_BYTES[dtype.rpartition("/")[2]]
        return _given_shape(question, dtype), weights
    path = _model_folder(question.model or "smollm2")
    try:
        config = ModelConfig.from_dir(path)
        layout = KVLayout.of(config, question.block_size, dtype)
    except ValueError as error:
        raise SettingsError(f"{error}; or give --layers, --kv-heads and --head-dim.") from error
    shape = CacheShape(
        _with_given(layout, question), question.window or config.widest_window, config.num_heads
    )
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors")) or None
    return shape, stored if params is None else params * DTYPE_BYTES[layout.compute_dtype]


def _dtype(question: Question) -> str:
    if question.dtype not in _DTYPES:
        raise SettingsError(
            f"--dtype must be one of {', '.join(_DTYPES)}, not {question.dtype!r}; a quantized "
            "cache is asked for with --kv-dtype."
        )
    if question.kv_dtype not in _KINDS:
        raise SettingsError(
            f"--kv-dtype must be one of {', '.join(_KINDS)}, not {question.kv_dtype!r}."
        )
    return kv_dtype(question.kv_dtype, _DTYPES[question.dtype])


def _is_given(question: Question) -> bool:
    """Whether the numbers alone say the shape."""
    heads = (question.kv_heads, question.head_dim)
    whole = question.layers is not None and (question.latent is not None or None not in heads)
    some = (question.layers, question.latent, *heads) != (None,) * 4
    if question.model is None and some and not whole:
        raise SettingsError(
            "Give all of --layers, --kv-heads and --head-dim, or --layers and --latent, or a MODEL."
        )
    return question.model is None and whole


def _given_shape(question: Question, dtype: str) -> CacheShape:
    layers = question.layers or 0
    kind = "full" if question.latent is None else "latent"
    heads, values = question.kv_heads or 0, question.head_dim or 0
    if question.latent is not None:
        heads, values = 1, question.latent
    try:
        sizes = (layers, heads, values, question.block_size, dtype, (kind,) * layers)
        return CacheShape(KVLayout("", *sizes), question.window)
    except ValueError as error:
        raise SettingsError(f"{error}.") from error


def _with_given(layout: KVLayout, question: Question) -> KVLayout:
    layers = question.layers or layout.num_layers
    return replace(
        layout,
        num_layers=layers,
        layer_kinds=(layout.layer_kinds * layers)[:layers],
        num_kv_heads=question.kv_heads or layout.num_kv_heads,
        head_dim=question.head_dim or layout.head_dim,
    )


def _model_folder(model: str) -> Path:
    if (Path(model) / "config.json").is_file():
        return Path(model)
    from baton.store import StoreError, resolve

    try:
        return resolve(model).path
    except StoreError as error:
        raise SettingsError(str(error)) from error


def _policy(text: str) -> KVPolicy:
    try:
        return parse_policy(text)
    except ValueError as error:
        raise SettingsError(f"--kv-policy: {error}.") from error


def _memory(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise SettingsError(f"--memory must be {error}, not {text!r}.") from error


def parse_params(text: str) -> int:
    """135000000 of "135M"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMBT]?)", text.strip().upper())
    if match is None:
        raise SettingsError(f"--params must be a number such as 135M or 70B, not {text!r}.")
    return int(float(match[1]) * _PARAM_UNITS[match[2]])
