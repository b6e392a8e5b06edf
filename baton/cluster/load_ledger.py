"""What all routers together have given each worker and is not done yet.

Each router writes its own totals, absolute ones, so that a lost or repeated write does no harm,
under a lease: what a dead router had promised is forgotten. A decision is confirmed by writing it
and reading what the others wrote before it, in one atomic call: of two routers that choose the
same worker at once, the later one sees the earlier one's load and chooses again. A router that was
the only one a moment ago (REFRESH_S) asks nobody. Without Redis a router goes on with its own
counts. Keys are strings, worker ids mostly; what is counted is the caller's.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from baton.cluster.background import background
from baton.cluster.errors import RegistryUnavailable
from baton.cluster.redis_link import RedisLink

CONFIRM_TIMEOUT_S = 0.015
LEASE_S = 3.0
REFRESH_S = 0.2
# What has ended is told at once, but not within this time after a call: then it waits for the next.
PAUSE_S = 0.02

# KEYS: own totals, set of routers. ARGV: own id, prefix of the totals' keys, lease ms, number of
# fields, field and value …, then the fields to read (none: all of the others' and own anew).
# Lines "FIELD REQUESTS TOKENS", one for each other router that has any; of all, "# 1 0" for each.
_SHARE = """
local me, prefix, found = ARGV[1], ARGV[2], {}
local last = 4 + 2 * ARGV[4]
local asked = {unpack(ARGV, last + 1)}
if #asked == 0 then redis.call('DEL', KEYS[1]) end
redis.call('HSET', KEYS[1], '#', '1', unpack(ARGV, 5, last))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('SADD', KEYS[2], me)
for _, id in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  if id ~= me and #asked > 0 then
    for index, value in ipairs(redis.call('HMGET', prefix .. id, unpack(asked))) do
      if value then found[#found + 1] = asked[index] .. ' ' .. value end
    end
  elseif id ~= me then
    local fields = redis.call('HGETALL', prefix .. id)
    if #fields == 0 then redis.call('SREM', KEYS[2], id) end
    for at = 1, #fields, 2 do
      local load = fields[at] == '#' and '1 0' or fields[at + 1]
      found[#found + 1] = fields[at] .. ' ' .. load
    end
  end
end
return table.concat(found, '\\n')
"""


class Load(NamedTuple):
    """Requests and tokens, of whichever kind the key stands for."""

    requests: int = 0
    tokens: int = 0

    def plus(self, other: "Load") -> "Load":
        return Load(self.requests + other.requests, self.tokens + other.tokens)

    def minus(self, other: "Load") -> "Load":
        return Load(self.requests - other.requests, self.tokens - other.tokens)


NOTHING = Load()
ROUTERS = "#"


@dataclass
class _Question:
    keys: Collection[str]
    answered: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class LoadLedger:
    """Without a link it is one router's own counts. `start` inside a running event loop."""

    def __init__(
        self,
        link: RedisLink | None = None,
        namespace: str = "baton",
        confirm_timeout_s: float = CONFIRM_TIMEOUT_S,
    ) -> None:
        self.router_id = secrets.token_hex(8)
        self._link = link
        self._confirm_timeout_s = confirm_timeout_s
        self._prefix = f"{{{namespace}}}:load:"
        self._routers = f"{{{namespace}}}:routers"
        self._share = link.client.register_script(_SHARE) if link else None
        self._own: dict[str, Load] = {}
        self._others: dict[str, Load] = {}
        self._changed: set[str] = set()
        self._questions: list[_Question] = []
        self._wanted = asyncio.Event()
        self._called_at = 0.0
        self._waking: asyncio.TimerHandle | None = None
        self._alone = False
        self._heard_at = 0.0
        self._task: asyncio.Task[None] | None = None

    # --- counts, without I/O ----------------------------------------------------------------

    @property
    def num_others(self) -> int:
        """Other routers, as of the last refresh."""
        return self._others.get(ROUTERS, NOTHING).requests

    def load(self, key: str) -> Load:
        """Own load, and what is known of the other routers'."""
        return self._own.get(key, NOTHING).plus(self._others.get(key, NOTHING))

    def add(self, claims: Mapping[str, Load]) -> None:
        for key, claim in claims.items():
            self._set(key, self._own.get(key, NOTHING).plus(claim))

    def remove(self, claims: Mapping[str, Load]) -> None:
        """Claims that were added."""
        for key, claim in claims.items():
            self._set(key, self._own[key].minus(claim))
        if self._task is not None and self._waking is None and not self._alone:
            loop = asyncio.get_running_loop()
            self._waking = loop.call_at(self._called_at + PAUSE_S, self._wanted.set)

    def _set(self, key: str, load: Load) -> None:
        self._own[key] = load
        self._changed.add(key)
        if load == NOTHING:
            del self._own[key]

    async def other_routers(self) -> list[str]:
        """Ids of those that shared their load within the lease. Raises RegistryUnavailable."""
        if self._link is None:
            return []
        client = self._link.client
        found = await self._link.call(lambda: client.smembers(self._routers), LEASE_S / 6)
        return sorted({member.decode() for member in found} - {self.router_id})

    # --- sharing ----------------------------------------------------------------------------

    async def confirm(self, keys: Iterable[str]) -> bool:
        """Tells the other routers the own load of `keys`. Ask `load`, choose, `add` and call this
        without awaiting anything in between. False when another router has given these keys more
        than `load` knew: remove the claims and choose again. True also without Redis, and when
        its answer takes too long."""
        if self._task is None or self._link is None or self._alone or not self._link.healthy:
            return True
        question = _Question(list(keys))
        seen = {key: self._others.get(key, NOTHING).requests for key in question.keys}
        self._questions.append(question)
        self._wanted.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._confirm_timeout_s):
                await question.answered
        return all(self._others.get(key, NOTHING).requests <= seen[key] for key in question.keys)

    async def start(self) -> None:
        if self._link is not None:
            self._task = background(self._run(), name="load-ledger")

    async def stop(self) -> None:
        """Takes this router's load out of the ledger."""
        if self._task is None or self._link is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        with contextlib.suppress(RegistryUnavailable):  # the lease ends by itself
            client = self._link.client
            await self._link.call(lambda: client.unlink(self._prefix + self.router_id), 0.5)

    async def _run(self) -> None:
        """One call at a time; what is wanted meanwhile goes together in the next one."""
        loop = asyncio.get_running_loop()
        refresh_at = loop.time()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(refresh_at):
                    await self._wanted.wait()
            self._wanted.clear()
            if self._waking is not None:
                self._waking.cancel()
                self._waking = None
            questions, self._questions = self._questions, []
            refresh = loop.time() >= refresh_at
            if refresh:
                refresh_at = loop.time() + REFRESH_S
            try:
                await self._round([] if refresh else _keys(questions), refresh)
                self._heard_at = loop.time()
            except RegistryUnavailable:
                if loop.time() > self._heard_at + LEASE_S:
                    self._others = {}
            for question in questions:
                if not question.answered.done():
                    question.answered.set_result(None)

    async def _round(self, keys: list[str], refresh: bool) -> None:
        if not refresh and not keys:
            keys = list(self._changed)
        self._called_at = asyncio.get_running_loop().time()
        changed, self._changed = self._changed, set()
        told = set(self._own) if refresh else changed
        if not refresh and not told:
            return
        found = await self._call(told, keys)
        fresh = _parse(found)
        if refresh:
            self._others, self._alone = fresh, ROUTERS not in fresh
        else:
            self._others.update({key: fresh.get(key, NOTHING) for key in keys})

    async def _call(self, told: Collection[str], keys: list[str]) -> bytes:
        assert self._link is not None and self._share is not None
        share = self._share
        arguments: list[Any] = [self.router_id, self._prefix, int(LEASE_S * 1000), len(told)]
        for key in told:
            arguments += [key, "{} {}".format(*self._own.get(key, NOTHING))]

        def send() -> Awaitable[bytes]:
            own = self._prefix + self.router_id
            return share(keys=[own, self._routers], args=[*arguments, *keys])

        return await self._link.call(send, LEASE_S / 6)


def _keys(questions: Iterable[_Question]) -> list[str]:
    return list({key for question in questions for key in question.keys})


def _parse(found: bytes) -> dict[str, Load]:
    """The sum of the lines of each key."""
    loads: dict[str, Load] = {}
    for line in found.decode().splitlines():
        key, requests, tokens = line.split(" ")
        loads[key] = loads.get(key, NOTHING).plus(Load(int(requests), int(tokens)))
    return loads
