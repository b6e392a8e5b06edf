"""What all routers of the cluster have served, whichever of them is asked.

Behind one port or one Service, a client reaches any of several routers. Each holds its own ended
requests; the asked one gathers what the others hold and says who did not answer. What grows with
the window is made and read on a thread, since the event loop streams tokens meanwhile.
"""

import asyncio
import heapq
import time
from collections.abc import Iterable, Mapping
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

from baton.cluster.bus import Bus, Told
from baton.cluster.reports.window import Slot
from router.ledgers import Ledgers


class Slots(NamedTuple):
    """Of each router by its id; `missing`: a sentence for each that did not answer."""

    by_router: dict[str, list[Slot]]
    missing: list[str]


class Everywhere:
    """Without a bus, as without Redis, it is this router alone."""

    def __init__(self, ledgers: Ledgers, router_id: str, bus: Bus | None) -> None:
        self._ledgers = ledgers
        self._id = router_id
        self._bus = bus
        if bus is not None:
            bus.answer = self._answer

    async def slots(self, window_s: float) -> Slots:
        """Of the last `window_s` seconds, in order of time."""
        told = await self._ask(kind="slots", window_s=window_s)
        others = await asyncio.to_thread(_read_slots, told.answers)
        return Slots({self._id: self._slots(window_s), **others}, told.missing)

    async def recent(
        self, limit: int, tenant: str | None
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """The newest of all, newest first, of one tenant or of all; and who did not answer."""
        told = await self._ask(kind="recent", limit=limit, tenant=tenant)
        started = itemgetter("started_at")
        rows = [row for answer in told.answers.values() for row in answer]
        rows += self._recent(limit, tenant)
        return heapq.nlargest(limit, rows, key=started), told.missing

    async def find(self, name: str, tenant: str | None) -> tuple[dict[str, Any] | None, list[str]]:
        """A request by its id or its answer's, of one tenant or of all; and who was asked in
        vain."""
        own = self._ledgers.find(name, tenant)
        if own is not None:
            return own, []
        told = await self._ask(kind="find", name=name, tenant=tenant)
        return next(filter(None, told.answers.values()), None), told.missing

    async def _ask(self, **question: Any) -> Told:
        return Told() if self._bus is None else await self._bus.ask(question)

    async def _answer(self, question: dict[str, Any]) -> Any:
        """Another router's question. Raises ValueError for one of a version that we do not know."""
        match question:
            case {"kind": "slots", "window_s": window_s}:
                return await asyncio.to_thread(slots_as_json, self._slots(window_s))
            case {"kind": "recent", "limit": limit, "tenant": tenant}:
                return self._recent(limit, tenant)
            case {"kind": "find", "name": name, "tenant": tenant}:
                return self._ledgers.find(name, tenant)
        raise ValueError("it does not know this question")

    def _slots(self, window_s: float) -> list[Slot]:
        return self._ledgers.window.since(time.time() - window_s)

    def _recent(self, limit: int, tenant: str | None) -> list[dict[str, Any]]:
        seen = (led for led in self._ledgers.recent if tenant is None or led.tenant == tenant)
        return [ledger.summary() for ledger in islice(seen, limit)]


def slots_as_json(slots: Iterable[Slot]) -> list[dict[str, Any]]:
    return [slot.as_json() for slot in slots]


def _read_slots(answers: Mapping[str, Any]) -> dict[str, list[Slot]]:
    return {router: list(map(Slot.from_json, slots)) for router, slots in answers.items()}
