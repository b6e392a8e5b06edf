"""Limits that all routers of a cluster count together, in Redis.

A bucket in Redis is one number, the moment at which it is full again by Redis' clock, and is gone
when that moment has come; a full one takes no room. Each router counts what passes it besides, by
its own bucket, which decides alone while Redis is away: a key has then as much at each router.
Nothing here waits longer than a request has for Redis.
"""

import asyncio
import contextlib

from baton.cluster.errors import RegistryUnavailable
from baton.cluster.redis_link import RedisLink
from router.access.bucket import Bucket

TAKE_TIMEOUT_S = 0.03
PAY_TIMEOUT_S = 0.5

# KEYS: the bucket. ARGV: per minute, cost (below 0: given back), whether it is paid whatever is
# left. What `Bucket` does; milliseconds to wait, 0 when the cost has been taken.
_TAKE = """
local size, cost = tonumber(ARGV[1]), tonumber(ARGV[2])
local rate, clock = size / 60000, redis.call('TIME')
local now = clock[1] * 1000 + clock[2] / 1000
local full_at = math.max(now, tonumber(redis.call('GET', KEYS[1]) or 0))
local missing = math.min(cost, size) - (size - (full_at - now) * rate)
if missing > 0 and ARGV[3] == '0' then return math.ceil(missing / rate) end
full_at = full_at + cost / rate
if full_at <= now then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], string.format('%.17g', full_at), 'PX', math.ceil(full_at - now))
end
return 0
"""


class SharedLimits:
    """The buckets in Redis."""

    def __init__(
        self,
        link: RedisLink,
        namespace: str = "baton",
        take_timeout_s: float = TAKE_TIMEOUT_S,
    ) -> None:
        self._link = link
        self._take_timeout_s = take_timeout_s
        self._prefix = f"{{{namespace}}}:limit:"
        self._script = link.client.register_script(_TAKE)
        self._paying: set[asyncio.Task[None]] = set()

    async def wait_s(self, name: str, per_minute: int, cost: float) -> float:
        """Takes `cost` and gives 0, or the seconds to wait. Raises RegistryUnavailable."""
        return await self._call(name, per_minute, cost, 0, self._take_timeout_s) / 1000

    def pay(self, name: str, per_minute: int, cost: float) -> None:
        """Beside the request, whatever is left."""
        task = asyncio.create_task(self._pay(name, per_minute, cost), name="pay-limit")
        self._paying.add(task)
        task.add_done_callback(self._paying.discard)

    async def _pay(self, name: str, per_minute: int, cost: float) -> None:
        with contextlib.suppress(RegistryUnavailable):  # each router has its own count of it
            await self._call(name, per_minute, cost, 1, PAY_TIMEOUT_S)

    async def _call(
        self, name: str, per_minute: int, cost: float, force: int, timeout_s: float
    ) -> int:
        keys, args = [self._prefix + name], [per_minute, cost, force]
        return await self._link.call(lambda: self._script(keys=keys, args=args), timeout_s)


class Limit:
    """One limit of one key. `name`: the same at all routers."""

    def __init__(self, name: str, per_minute: int, shared: SharedLimits | None = None) -> None:
        self.per_minute = per_minute
        self._name = name
        self._own = Bucket(per_minute)
        self._shared = shared

    async def take(self, cost: float, now: float) -> float:
        """Takes `cost` and gives 0, or the seconds to wait."""
        wait_s = await self._wait_s(cost, now)
        if wait_s == 0:
            self._own.pay(cost, now)
        return wait_s

    async def _wait_s(self, cost: float, now: float) -> float:
        if self._shared is not None:
            with contextlib.suppress(RegistryUnavailable):
                return await self._shared.wait_s(self._name, self.per_minute, cost)
        return self._own.wait_s(cost, now)

    def pay(self, cost: float, now: float) -> None:
        """Whatever is left; a cost below 0 is given back."""
        self._own.pay(cost, now)
        if self._shared is not None and cost != 0:
            self._shared.pay(self._name, self.per_minute, cost)
