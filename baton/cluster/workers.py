"""What a worker tells the cluster about itself: identity, limits, cache shape, load.

Plain frozen data, JSON both ways; unknown keys are ignored so that versions may differ by a
field. Knows neither Redis nor protobuf. An incarnation names one life of one process, and
`new_incarnation` makes them sort by birth.
"""

import dataclasses
import secrets
import time
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any, Self

import orjson

from baton.kv_policy import KVPolicy, states_per_block
from baton.step_totals import StepTotals


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class KVLayout:
    """Shape of a KV cache; see `hands_over_to`."""

    fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    def __hash__(self) -> int:
        """Layouts of one model are few, and asked for in every placement."""
        return hash(self.fingerprint)

    def hands_over_to(self, decode: Self) -> bool:
        """Blocks of plain values are cut, and their values converted; quantized ones are wholes."""
        if "/" in self.dtype:
            return self == decode
        whole = "/" in decode.dtype and self.block_size % decode.block_size != 0
        own = dataclasses.replace(self, dtype=decode.dtype, block_size=decode.block_size)
        return not whole and own == decode


@dataclass(frozen=True)
class WorkerLoad:
    """Load at one moment; `free_blocks` includes cached blocks that may be evicted, and
    blocks promised to hand-offs that have not begun."""

    waiting: int = 0
    running: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    handoffs_in_flight: int = 0
    draining: bool = False
    promised_blocks: int = 0


@dataclass(frozen=True)
class WorkerLink:
    """How a prefill worker reaches one decode worker; `degraded` transports have failed and
    rest until a pause has passed. `in_flight_bytes` are sent and not yet acknowledged;
    `token_bytes` is what the last hand-off shipped per token, 0 when there was none."""

    peer: str
    transport: str
    degraded: tuple[str, ...] = ()
    in_flight_bytes: int = 0
    token_bytes: int = 0


@dataclass(frozen=True)
class WorkerRecord:
    """One worker as the registry knows it."""

    worker_id: str
    incarnation: str
    role: Role
    address: str
    model: str
    layout: KVLayout
    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    load: WorkerLoad
    links: tuple[WorkerLink, ...] = ()
    chunk_size: int = 512
    """Token budget of one of its steps."""
    kv_policy: str = "full"
    """Of requests that name none."""
    kv_policies: tuple[str, ...] = ("full",)
    """Names of those that its model and cache can have."""
    profile: tuple[StepTotals, ...] = ()
    """Steps that it measured at its start."""
    cores: tuple[int, ...] = ()
    """Of its host, that it was told to run on; empty when it was not."""
    streams_replies: bool = False
    """Whether a router may have the events of all its calls by one stream."""

    @cached_property
    def link_to(self) -> dict[str, WorkerLink]:
        """By the decode worker's address."""
        return {link.peer: link for link in self.links}

    def can_hold(self, policy: KVPolicy, num_prompt_tokens: int, num_tokens: int) -> bool:
        """Whether a sequence that grows to `num_tokens` would fit into it if it were alone."""
        if policy.is_full:
            return num_tokens <= self.max_model_len
        layout, size = self.layout, self.layout.block_size
        table, compact, states = policy.blocks(num_tokens, num_prompt_tokens, size)
        value_bytes = 4 if layout.dtype.endswith("float32") else 2
        tail = -(-states // states_per_block(size, layout.head_dim, value_bytes))
        within = policy.is_endless or num_tokens <= self.max_model_len
        return within and table + compact + tail <= self.num_blocks

    def to_json(self) -> bytes:
        return orjson.dumps(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Raises ValueError when the text is not a record."""
        try:
            raw = dict(orjson.loads(data))
            raw["role"] = Role(raw["role"])
            raw["layout"] = _one_of_a_kind(KVLayout(**_known(KVLayout, raw["layout"])))
            raw["load"] = WorkerLoad(**_known(WorkerLoad, raw["load"]))
            raw["profile"] = tuple(
                StepTotals(**_known(StepTotals, totals)) for totals in raw.get("profile", ())
            )
            raw["cores"] = tuple(raw.get("cores", ()))
            raw["kv_policies"] = tuple(raw.get("kv_policies", ("full",)))
            raw["links"] = tuple(_link(link) for link in raw.get("links", ()))
            return cls(**_known(cls, raw))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a worker record: {error}") from error


@lru_cache(maxsize=256)
def _one_of_a_kind(layout: KVLayout) -> KVLayout:
    """The same object for equal layouts, so that comparing them costs nothing."""
    return layout


def _link(raw: dict[str, Any]) -> WorkerLink:
    fields = _known(WorkerLink, raw)
    return WorkerLink(**{**fields, "degraded": tuple(fields.get("degraded", ()))})


def _known(cls: type, raw: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(cls)}
    return {key: value for key, value in raw.items() if key in names}


def new_incarnation() -> str:
    """A fresh incarnation: 16 hex digits of birth time, then a random part."""
    return f"{time.time_ns():016x}-{secrets.token_hex(4)}"
