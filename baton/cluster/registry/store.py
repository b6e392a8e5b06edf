"""The worker records in Redis: one key with a time to live per worker, and an index of ids.

Each verb is one round trip with a deadline; it raises RegistryUnavailable and never retries.
A record belongs to one incarnation: only that one may withdraw it, and an older life of the
same worker never overwrites a newer one. Knows nothing of schedules; see Announcer, Directory.
"""

import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from baton.cluster.redis_client import CALL_TIMEOUT_S, answer, close, connect, messages
from baton.cluster.workers import WorkerRecord

_log = logging.getLogger(__name__)

# KEYS: record, index. ARGV: json, ttl ms, worker id, channel, incarnation, draining ("1"/"0").
# Birth-ordered incarnations (16 hex digits first) fence an older life that wakes up late.
_PUBLISH = """
local old = redis.call('GET', KEYS[1])
local news = not old
if old then
  local was = cjson.decode(string.sub(old, 18))
  if was.incarnation ~= ARGV[5] then
    local shape = '^' .. string.rep('%x', 16) .. '%-'
    if string.find(was.incarnation, shape) and string.find(ARGV[5], shape)
       and was.incarnation > ARGV[5] then return 0 end
    news = true
  end
  if (was.load.draining and '1' or '0') ~= ARGV[6] then news = true end
end
local now = redis.call('TIME')
local beat = string.format('%010d%06d', now[1], now[2])
redis.call('SET', KEYS[1], beat .. ' ' .. ARGV[1], 'PX', ARGV[2])
redis.call('SADD', KEYS[2], ARGV[3])
if news then redis.call('PUBLISH', ARGV[4], ARGV[3]) end
return 1
"""

# KEYS: record, index. ARGV: incarnation, worker id, channel.
_WITHDRAW = """
local old = redis.call('GET', KEYS[1])
if not old or cjson.decode(string.sub(old, 18)).incarnation ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[2])
redis.call('PUBLISH', ARGV[3], ARGV[2])
return 1
"""

# KEYS: index, epoch. ARGV: record key prefix, an epoch to set when there is none.
# A new epoch tells readers that Redis lost its data, so that absence means nothing yet. Writing it
# each time shows whether workers can write their heartbeats: if not, absence means nothing either.
_LIST = """
local epoch = redis.call('GET', KEYS[2]) or ARGV[2]
local writable = redis.pcall('SET', KEYS[2], epoch).ok and '1' or '0'
local now = redis.call('TIME')
local found = {epoch, writable, string.format('%010d%06d', now[1], now[2])}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local value = redis.call('GET', ARGV[1] .. id)
  if value then found[#found + 1] = value else redis.pcall('SREM', KEYS[1], id) end
end
return found
"""


@dataclass(frozen=True)
class Listing:
    """One read of the registry. `beats[i]` is Redis' clock (s) at the heartbeat of `records[i]`.
    Not `writable`: Redis is read-only or full, and records expire though their workers live."""

    epoch: str
    writable: bool
    now_s: float
    records: tuple[WorkerRecord, ...]
    beats: tuple[float, ...]


class Registry:
    """Worker records in one Redis; safe to share between tasks of one event loop. Every call but
    `changes` has `timeout_s`: services give up soon, people at a terminal would rather wait."""

    def __init__(
        self, url: str, namespace: str = "baton", timeout_s: float = CALL_TIMEOUT_S
    ) -> None:
        self._redis = connect(url, timeout_s)
        self._timeout_s = timeout_s
        self._namespace = f"{{{namespace}}}"  # a hash tag: one slot of a Redis Cluster holds it all
        self._publish = self._redis.register_script(_PUBLISH)
        self._withdraw = self._redis.register_script(_WITHDRAW)
        self._list = self._redis.register_script(_LIST)

    async def publish(self, record: WorkerRecord, ttl_s: float) -> bool:
        """Writes the record for `ttl_s`; False when a newer life of this worker holds the key."""
        arguments: list[bytes | int | str] = [
            record.to_json(),
            int(ttl_s * 1000),
            record.worker_id,
            self._channel,
            record.incarnation,
            "1" if record.load.draining else "0",
        ]
        keys = [self._key(record.worker_id), self._index]
        return bool(await self._answer(self._publish(keys=keys, args=arguments)))

    async def withdraw(self, record: WorkerRecord) -> bool:
        """Removes the record if it is still this incarnation's."""
        keys = [self._key(record.worker_id), self._index]
        arguments = [record.incarnation, record.worker_id, self._channel]
        return bool(await self._answer(self._withdraw(keys=keys, args=arguments)))

    async def list(self) -> list[WorkerRecord]:
        return list((await self.read()).records)

    async def read(self) -> Listing:
        """All live records with their heartbeats, sorted by worker id."""
        keys = [self._index, f"{self._namespace}:epoch"]
        arguments = [self._key(""), secrets.token_hex(8)]
        found: list[bytes] = await self._answer(self._list(keys=keys, args=arguments))
        epoch, writable, now, *values = found
        parsed = sorted(_parse(values), key=lambda pair: pair[1].worker_id)
        return Listing(
            epoch=epoch.decode(),
            writable=writable == b"1",
            now_s=int(now) / 1e6,
            records=tuple(record for _, record in parsed),
            beats=tuple(beat for beat, _ in parsed),
        )

    async def ping(self) -> None:
        await self._answer(self._redis.ping())

    async def changes(self) -> AsyncGenerator[None, None]:
        """Yields once when subscribed and then on every change, until Redis goes away."""
        async with aclosing(messages(self._redis, self._channel)) as heard:
            async for _ in heard:
                yield

    async def close(self) -> None:
        await close(self._redis)

    async def _answer(self, call: Any) -> Any:
        return await answer(call, self._timeout_s)

    @property
    def _index(self) -> str:
        return f"{self._namespace}:workers"

    @property
    def _channel(self) -> str:
        return f"{self._namespace}:changes"

    def _key(self, worker_id: str) -> str:
        return f"{self._namespace}:worker:{worker_id}"


def _parse(values: list[bytes]) -> list[tuple[float, WorkerRecord]]:
    parsed = []
    for value in values:
        beat, _, text = value.partition(b" ")
        try:
            parsed.append((int(beat) / 1e6, WorkerRecord.from_json(text)))
        except ValueError as error:
            _log.warning("Ignored a registry entry: %s", error)
    return parsed
