"""What the routers of a cluster share through Redis: the prefix index, the load of all, the limits
of API keys, and answers about the requests that each of them has served.

Without a Redis URL, as in tests of one router, it is this router's own.
"""

from baton.cluster.bus import Bus
from baton.cluster.load_ledger import LoadLedger
from baton.cluster.prefix_index import PrefixIndex, PrefixStore
from baton.cluster.redis_link import RedisLink
from router.access import SharedLimits


class Shared:
    """`start` inside a running event loop."""

    def __init__(self, redis_url: str | None = None) -> None:
        self._link = RedisLink(redis_url) if redis_url else None
        self.ledger = LoadLedger(self._link)
        self.index: PrefixIndex | None = None
        self.limits: SharedLimits | None = None
        self.bus: Bus | None = None
        if self._link is not None:
            self.limits = SharedLimits(self._link)
            self.bus = Bus(self._link, self.ledger.router_id, self.ledger.other_routers)
            self.index = PrefixIndex(self._link, PrefixStore(self._link.client))

    @property
    def healthy(self) -> bool:
        """False while Redis does not answer in the time that a request has for it."""
        return self._link is None or self._link.healthy

    async def start(self) -> None:
        if self._link is not None:
            await self._link.start()
        if self.index is not None:
            await self.index.start()
        await self.ledger.start()
        if self.bus is not None:
            await self.bus.start()

    async def stop(self) -> None:
        if self.bus is not None:
            await self.bus.stop()
        await self.ledger.stop()
        if self.index is not None:
            await self.index.stop()
        if self._link is not None:
            await self._link.close()
