"""What a sequence keeps in its KV cache: the policies, their notation and their arithmetic.

A policy says how many tokens are kept when so many are computed; which ones, and how attention
reads them, is the engine's (`baton.engine.retention`, `baton.engine.ops.sinks`). What is dropped
leaves no hole: a cache is compact, so the slot of a token is its position minus the number of
dropped ones. Plain Python, the same in router, workers and command line.
"""

import math
import re
from dataclasses import dataclass, fields
from typing import ClassVar

MAX_KERNEL = 255
MAX_OBSERVED = 512
"""Tokens whose queries SnapKV keeps outside the pool until the prompt is computed."""
"""Pooling takes time in proportion to it, in every layer, while others wait for the step."""


@dataclass(frozen=True)
class KVPolicy:
    """`full`: everything is kept."""

    name: ClassVar[str] = "full"
    is_full: ClassVar[bool] = True
    keeps_state: ClassVar[bool] = False
    """Whether the engine keeps numbers per cached token beside keys and values."""
    is_endless: ClassVar[bool] = False
    """Whether a sequence may be longer than the model's context."""
    shares_prefix: ClassVar[bool] = True
    """Whether blocks before the first drop may be found by their hash."""

    def __str__(self) -> str:
        named = ",".join(f"{f.name}={_shown(getattr(self, f.name))}" for f in fields(self))
        return f"{self.name}({named})" if named else self.name

    def kept(self, num_tokens: int, num_prompt_tokens: int, block_size: int) -> int:
        """Tokens in the cache between steps, when `num_tokens` are computed."""
        return num_tokens

    def kept_in_step(self, num_tokens: int, num_prompt_tokens: int, block_size: int) -> int:
        """Most that lie in the cache while tokens up to `num_tokens` are computed after a drop."""
        return self.kept(num_tokens, num_prompt_tokens, block_size)

    def compacts(self, num_prompt_tokens: int) -> bool:
        """Whether what is kept of a computed prompt is copied into blocks of its own."""
        return False

    def step_end(self, num_computed_tokens: int, num_prompt_tokens: int) -> float:
        """The last position that may be computed in the step that begins at the first."""
        return math.inf

    def reusable(self, num_tokens: int, num_prompt_tokens: int) -> int:
        """Leading tokens that need not be computed if their blocks are cached."""
        return num_tokens - 1 if self.shares_prefix else 0

    def blocks(
        self, num_tokens: int, num_prompt_tokens: int, block_size: int
    ) -> tuple[int, int, int]:
        """To compute so many tokens: blocks of the table, blocks for what is kept of the prompt,
        and tokens with a state of their own."""
        most = self.kept_in_step(num_tokens, num_prompt_tokens, block_size)
        states = self.num_states(num_prompt_tokens)
        if self.compacts(num_prompt_tokens):
            return -(-num_prompt_tokens // block_size), -(-most // block_size), states
        return -(-most // block_size), 0, states

    def num_states(self, num_prompt_tokens: int) -> int:
        """Tokens that may have a state at once, from the beginning to the end."""
        return 0

    @property
    def span(self) -> int:
        """Positions that attention tells apart, if that is less than the whole text."""
        return 0


@dataclass(frozen=True)
class Streaming(KVPolicy):
    """Attention sinks (StreamingLLM, Xiao et al., arXiv 2309.17453): a token sees the first
    `sinks` tokens and the last `window`, itself included."""

    name: ClassVar[str] = "streaming"
    is_full: ClassVar[bool] = False
    is_endless: ClassVar[bool] = True
    sinks: int = 4
    window: int = 1024

    def __post_init__(self) -> None:
        _at_least("sinks", self.sinks, 0)
        _at_least("window", self.window, 1)

    def kept(self, num_tokens: int, num_prompt_tokens: int, block_size: int) -> int:
        outside = (num_tokens + 1 - self.window) // block_size - -(-self.sinks // block_size)
        return num_tokens - max(0, outside) * block_size

    def reusable(self, num_tokens: int, num_prompt_tokens: int) -> int:
        """A sequence that will drop blocks counts on getting them back: it shares none."""
        return num_tokens - 1 if num_tokens <= self.span else 0

    def kept_in_step(self, num_tokens: int, num_prompt_tokens: int, block_size: int) -> int:
        """With room for one token: what a step computes more needs more room."""
        sinks = -(-self.sinks // block_size) * block_size
        return min(num_tokens, sinks + self.window + 2 * block_size)

    @property
    def span(self) -> int:
        return self.sinks + self.window


@dataclass(frozen=True)
class _Budgeted(KVPolicy):
    """`budget`: tokens, or a share of the prompt if it is a fraction."""

    is_full: ClassVar[bool] = False
    budget: float = 0.25

    def __post_init__(self) -> None:
        if isinstance(self.budget, float) and not 0 < self.budget <= 1:
            raise ValueError(f"budget must be above 0 and at most 100 %, not {self.budget:.0%}")
        if isinstance(self.budget, int) and self.budget <= self.least:
            raise ValueError(f"budget must be above {self.least} tokens, not {self.budget}")

    @property
    def least(self) -> int:
        return 1

    def tokens(self, num_prompt_tokens: int) -> int:
        """The budget in tokens."""
        if isinstance(self.budget, int):
            return self.budget
        return max(math.ceil(self.budget * num_prompt_tokens), self.least + 1)

    def compacts(self, num_prompt_tokens: int) -> bool:
        return self.tokens(num_prompt_tokens) < num_prompt_tokens


@dataclass(frozen=True)
class SnapKV(_Budgeted):
    """SnapKV (Li et al., arXiv 2404.14469): of a computed prompt each head keeps its last `window`
    tokens and those that these attend to most, scores pooled over `kernel` neighbours."""

    name: ClassVar[str] = "snapkv"
    window: int = 32
    kernel: int = 7

    def __post_init__(self) -> None:
        if not 1 <= self.window <= MAX_OBSERVED:
            raise ValueError(f"window must be from 1 to {MAX_OBSERVED}, not {self.window}")
        if not 1 <= self.kernel <= MAX_KERNEL or self.kernel % 2 == 0:
            raise ValueError(f"kernel must be an odd number up to {MAX_KERNEL}, not {self.kernel}")
        super().__post_init__()

    @property
    def least(self) -> int:
        return self.window

    def kept(self, num_tokens: int, num_prompt_tokens: int, block_size: int) -> int:
        if num_tokens < num_prompt_tokens:
            return num_tokens
        prompt = min(self.tokens(num_prompt_tokens), num_prompt_tokens)
        return prompt + num_tokens - num_prompt_tokens

    def step_end(self, num_computed_tokens: int, num_prompt_tokens: int) -> float:
        computing_prompt = num_computed_tokens < num_prompt_tokens
        return num_prompt_tokens if computing_prompt else math.inf

    def reusable(self, num_tokens: int, num_prompt_tokens: int) -> int:
        """The window's queries are needed."""
        if not self.compacts(num_prompt_tokens):
            return num_tokens - 1
        return max(0, min(num_tokens - 1, num_prompt_tokens - self.window))


@dataclass(frozen=True)
class H2O(_Budgeted):
    """Heavy hitters (Zhang et al., arXiv 2306.14048): beyond the budget each new token costs each
    head, of all but the newest half, the one that has received the least attention so far."""

    name: ClassVar[str] = "h2o"
    keeps_state: ClassVar[bool] = True
    shares_prefix: ClassVar[bool] = False  # its blocks are written again and again
    budget: float = 512

    def newest(self, num_prompt_tokens: int) -> int:
        """Tokens that are kept whatever attention they receive."""
        return self.tokens(num_prompt_tokens) // 2

    def num_states(self, num_prompt_tokens: int) -> int:
        return self.tokens(num_prompt_tokens) + 1

    def kept(self, num_tokens: int, num_prompt_tokens: int, block_size: int) -> int:
        if num_tokens < num_prompt_tokens:
            return num_tokens
        return min(num_tokens, self.tokens(num_prompt_tokens))

    def kept_in_step(self, num_tokens: int, num_prompt_tokens: int, block_size: int) -> int:
        return min(num_tokens, self.tokens(num_prompt_tokens) + 1)

    def step_end(self, num_computed_tokens: int, num_prompt_tokens: int) -> float:
        computing_prompt = num_computed_tokens < num_prompt_tokens
        return num_prompt_tokens if computing_prompt else num_computed_tokens + 1


def states_per_block(block_size: int, head_dim: int, value_bytes: int) -> int:
    """Cached tokens whose state fits into a block: per head a number of 4 bytes in each plane."""
    return block_size * head_dim * value_bytes // 4


FULL = KVPolicy()
POLICIES: dict[str, type[KVPolicy]] = {p.name: p for p in (KVPolicy, Streaming, SnapKV, H2O)}
_DIGITS = 9
_NOTATION = re.compile(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*")


def parse_policy(text: str) -> KVPolicy:
    """Of `full`, `streaming(sinks=4,window=1024)`, `snapkv(budget=0.25)`, `h2o(budget=512)`;
    a budget may be written 25%. ValueError says which part is wrong."""
    match = _NOTATION.fullmatch(text)
    if match is None or match[1] not in POLICIES:
        known = "full, streaming(sinks=4,window=1024), snapkv(budget=0.25) or h2o(budget=512)"
        raise ValueError(f"{text!r} is not a policy; use {known}")
    kind = POLICIES[match[1]]
    given: dict[str, float] = {}
    for part in filter(None, (match[2] or "").split(",")):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        names = [f.name for f in fields(kind)]
        if not equals or name not in names or name in given:
            raise ValueError(f"{part.strip()!r}: {kind.name} takes {', '.join(names) or 'nothing'}")
        given[name] = _number(name, value)
    return kind(**given)


def _number(name: str, text: str) -> float:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(%?)", text, re.ASCII)
    if match is None or (name != "budget" and not text.isdecimal()):
        raise ValueError(f"{name} must be a number of tokens, not {text!r}")
    if match[2]:
        return round(float(match[1]) / 100, _DIGITS)
    return float(text) if "." in text else int(text)


def _shown(value: float) -> str:
    """As `_number` reads it back."""
    if isinstance(value, int):
        return str(value)
    text = f"{value:.{_DIGITS}f}".rstrip("0")
    return text + "0" if text.endswith(".") else text


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
