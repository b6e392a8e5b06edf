"""Prefixes that eviction passes over until their time is up. Plain bookkeeping: `now` comes from
outside, and no block is owned here; a pinned prefix need not be cached yet.

Each tenant has a quota of blocks, and all together have one: a pin covers as many leading blocks of
its prefix as fit. Blocks that several pins of a tenant share count once.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MOST_PINS = 256
"""Of one tenant."""
MOST_TOGETHER = 1024
"""Of all: a tenant that pins what others pin takes none of the common quota of blocks, and without
API keys anybody may name a new tenant."""


@dataclass(frozen=True)
class Pin:
    """`hashes`: of the leading blocks, in order. The last one names the pin."""

    tenant: str
    hashes: tuple[bytes, ...]
    expires_at: float

    @property
    def id(self) -> str:
        return self.hashes[-1].hex()


class Pins:
    """`per_tenant` and `together`: most blocks pinned."""

    def __init__(self, per_tenant: int, together: int) -> None:
        self.per_tenant = per_tenant
        self.together = together
        self._pins: dict[tuple[str, bytes], Pin] = {}
        self._counts: dict[str, Counter[bytes]] = {}
        self._all: Counter[bytes] = Counter()

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def holds(self, digest: bytes) -> bool:
        return digest in self._all

    def add(self, tenant: str, hashes: Sequence[bytes], expires_at: float) -> Pin | None:
        """The pin, or the one that it prolongs; None when nothing of it fits."""
        covered = tuple(hashes[: self._room(tenant, hashes)])
        if not covered:
            return None
        key = (tenant, covered[-1])
        known = self._pins.get(key)
        if known is not None:
            pin = Pin(tenant, known.hashes, max(expires_at, known.expires_at))
        elif self._has_all_its_pins(tenant):
            return None
        else:
            pin = Pin(tenant, covered, expires_at)
            self._counts.setdefault(tenant, Counter()).update(covered)
            self._all.update(covered)
        self._pins[key] = pin
        return pin

    def remove(self, pin_id: str) -> list[bytes]:
        """Ends the pins of that id, of whichever tenant; hashes that no pin covers any more."""
        return self._end([pin for pin in self._pins.values() if pin.id == pin_id])

    def expire(self, now: float) -> list[bytes]:
        """Ends the pins whose time is up; hashes that no pin covers any more."""
        return self._end([pin for pin in self._pins.values() if pin.expires_at <= now])

    def clear(self) -> list[bytes]:
        return self._end(list(self._pins.values()))

    def _has_all_its_pins(self, tenant: str) -> bool:
        own = sum(pin.tenant == tenant for pin in self._pins.values())
        return own >= MOST_PINS or len(self._pins) >= MOST_TOGETHER

    def _room(self, tenant: str, hashes: Sequence[bytes]) -> int:
        """How many leading hashes both quotas allow."""
        mine = self._counts.get(tenant, Counter())
        own_room, room = self.per_tenant - len(mine), self.together - len(self._all)
        for count, digest in enumerate(hashes):
            own_room -= digest not in mine
            room -= digest not in self._all
            if own_room < 0 or room < 0:
                return count
        return len(hashes)

    def _end(self, pins: list[Pin]) -> list[bytes]:
        for pin in pins:
            del self._pins[pin.tenant, pin.hashes[-1]]
            for counts in (self._counts[pin.tenant], self._all):
                counts.subtract(pin.hashes)
                for digest in pin.hashes:
                    if counts[digest] <= 0:
                        del counts[digest]
            if not self._counts[pin.tenant]:
                del self._counts[pin.tenant]
        return [digest for pin in pins for digest in pin.hashes if digest not in self._all]
