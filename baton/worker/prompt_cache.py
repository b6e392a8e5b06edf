"""What clients and operators do to a worker's prefix cache: pin, list, unpin, flush.

Takes the engine's lock for each; what a pin means is the block manager's.
"""

import time
from collections.abc import Iterable
from typing import Any

from baton.engine.block_manager import BlockManager
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from baton.v1 import common_pb2
from baton.v1 import worker_pb2 as pb

PinTerms = tuple[int, float, str]
"""Leading tokens, seconds, tenant."""


def pins_from_pb(pins: Iterable[common_pb2.CachePin]) -> tuple[PinTerms, ...]:
    """Raises ValueError that names the field."""
    for pin in pins:
        if not 0 < pin.ttl_s < float("inf"):
            raise ValueError("pins.ttl_s must be a number above 0")
    return tuple((pin.num_tokens, pin.ttl_s, pin.tenant) for pin in pins)


def pin_prompt(engine: Engine[Any], seq: Sequence, terms: Iterable[PinTerms]) -> None:
    """Before the prompt is computed: what is cached of it already is safe from here on."""
    blocks, now = engine.blocks, time.monotonic()

    def pin() -> None:
        for num_tokens, ttl_s, tenant in terms:
            within = min(num_tokens, seq.num_prompt_tokens)
            blocks.pin(tenant, seq.full_block_hashes(blocks.block_size, within), now + ttl_s)

    if terms:
        engine.apply(pin)


def add_pinned(
    engine: Engine[Any],
    seq: Sequence,
    terms: Iterable[PinTerms],
    max_uncached: int | None = None,
) -> None:
    """As `Engine.add`. No step comes between a prompt and its pins, and what is not taken pins
    nothing."""

    def add() -> None:
        engine.add(seq, max_uncached)
        pin_prompt(engine, seq, terms)

    engine.apply(add)


class PromptCache:
    def __init__(self, engine: Engine[Any]) -> None:
        self._engine = engine
        self._blocks: BlockManager = engine.blocks

    def info(self, now: float) -> pb.CacheInfo:
        return self._engine.apply(lambda: self._info(now))

    def unpin(self, pin_id: str) -> bool:
        return self._engine.apply(lambda: self._blocks.unpin(pin_id))

    def flush(self) -> int:
        def flush() -> int:
            known = len(self._blocks.published())
            self._blocks.flush()
            return known

        return self._engine.apply(flush)

    def _info(self, now: float) -> pb.CacheInfo:
        blocks = self._blocks
        blocks.expire_pins(now)
        pins = [
            pb.PinInfo(
                id=pin.id,
                tenant=pin.tenant,
                blocks=len(pin.hashes),
                cached_blocks=len(blocks.match_prefix(pin.hashes)),
                expires_in_s=pin.expires_at - now,
            )
            for pin in blocks.pins
        ]
        return pb.CacheInfo(
            known_blocks=len(blocks.published()),
            idle_blocks=blocks.num_cached,
            pinned_blocks=blocks.num_pinned,
            block_size=blocks.block_size,
            tenant_quota_blocks=blocks.pins.per_tenant,
            pins=pins,
        )
