"""The prefix index in Redis: for each life of a worker one set of block hashes, under a lease.

| Key | Content |
|---|---|
| `{NS}:held:ID:INCARNATION` | hashes of the blocks it holds, and the number of the last change |
| `{NS}:coming:PERIOD:ID:INCARNATION` | hashes of prompts routed there in one period |
| `{NS}:coming:PERIOD` | the lives that have any |

Each set holds whole chains: with a block it holds all before it. So how much of a prompt a worker
has is found by halving: log2(blocks) probes for each worker, all in one script, one round trip.
Everything of a life is in keys that name it and expire, so a dead life leaves nothing behind.
The verbs are calls not yet awaited: the caller chooses the deadline.
"""

from collections.abc import Awaitable, Sequence
from typing import Any

from baton.block_hash import DIGEST_SIZE
from baton.cluster.prefix_index.matches import WorkerKey
from baton.cluster.redis_client import Client

CHUNK = 4096
"""Hashes in one call of `change` or `replace`."""
PERIOD_S = 10
"""Blocks that a routed request will create count for one to two periods."""

# Adds to (SADD) or takes from (SREM) a set the hashes that stand in `packed` end to end. Lua can
# pass some 8,000 arguments at most.
_EACH = f"""
local function each(verb, key, packed)
  local size, step = {DIGEST_SIZE}, 1000
  for first = 1, #packed, size * step do
    local digests = {{}}
    for at = first, math.min(first + size * step, #packed + 1) - size, size do
      digests[#digests + 1] = string.sub(packed, at, at + size - 1)
    end
    redis.call(verb, key, unpack(digests))
  end
end
"""

# KEYS: held. ARGV: number of the change before, of this one, removed, added, lease ms.
# The number is a member of the set, so that both are lost together or not at all.
_CHANGE = (
    _EACH
    + """
if redis.call('SISMEMBER', KEYS[1], 's' .. ARGV[1]) == 0 then return 0 end
each('SREM', KEYS[1], ARGV[3])
each('SADD', KEYS[1], ARGV[4])
if ARGV[1] ~= ARGV[2] then
  redis.call('SADD', KEYS[1], 's' .. ARGV[2])
  redis.call('SREM', KEYS[1], 's' .. ARGV[1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return 1
"""
)

# KEYS: held, its successor. ARGV: hashes, lease ms, number with the last part or nothing.
_REPLACE = (
    _EACH
    + """
each('SADD', KEYS[2], ARGV[1])
if ARGV[3] ~= '' then
  redis.call('SADD', KEYS[2], 's' .. ARGV[3])
  redis.call('RENAME', KEYS[2], KEYS[1])
end
redis.call('PEXPIRE', KEYS[ARGV[3] == '' and 2 or 1], ARGV[2])
return 1
"""
)

# KEYS: prefix. ARGV: period s, then for each layout the hashes of a prompt and names of workers.
# For each worker "held coming;". All workers are probed at the same positions, so a hash is cut
# out of the prompt once.
_LEADING = f"""
local size, sub, call, floor = {DIGEST_SIZE}, string.sub, redis.call, math.floor
local held, period = KEYS[1] .. ':held:', floor(call('TIME')[1] / ARGV[1])
local periods = {{}}
for back = 0, 1 do
  local key, names = KEYS[1] .. ':coming:' .. (period - back), {{}}
  for _, name in ipairs(call('SMEMBERS', key)) do names[name] = true end
  periods[key] = names
end
local found = {{}}
for group = 2, #ARGV, 2 do
  local chain, digests = ARGV[group], {{}}
  local total = #chain / size
  local function has(key, at)
    local digest = digests[at]
    if not digest then
      digest = sub(chain, at * size - size + 1, at * size)
      digests[at] = digest
    end
    return call('SISMEMBER', key, digest) == 1
  end
  local function leading(key)
    if total == 0 or not has(key, 1) then return 0 end
    local low, high = 1, total + 1
    while high - low > 1 do
      local middle = floor((low + high) / 2)
      if has(key, middle) then low = middle else high = middle end
    end
    return low
  end
  for name in string.gmatch(ARGV[group + 1], '%S+') do
    local coming = 0
    for prefix, names in pairs(periods) do
      if names[name] then coming = math.max(coming, leading(prefix .. ':' .. name)) end
    end
    found[#found + 1] = leading(held .. name) .. ' ' .. coming
  end
end
return table.concat(found, ';')
"""

# KEYS: prefix. ARGV: period s, then for each worker its name, most blocks to keep, hashes.
_EXPECT = (
    _EACH
    + """
local period = KEYS[1] .. ':coming:' .. math.floor(redis.call('TIME')[1] / ARGV[1])
for at = 2, #ARGV, 3 do
  local key = period .. ':' .. ARGV[at]
  if redis.call('SCARD', key) < tonumber(ARGV[at + 1]) then
    each('SADD', key, ARGV[at + 2])
    redis.call('EXPIRE', key, 2 * ARGV[1])
    redis.call('SADD', period, ARGV[at])
  end
end
redis.call('EXPIRE', period, 2 * ARGV[1])
return 1
"""
)


class PrefixStore:
    """The scripts, by what they do."""

    def __init__(self, client: Client, namespace: str = "baton", period_s: int = PERIOD_S) -> None:
        self._client = client
        self._prefix = f"{{{namespace}}}"
        self._period_s = period_s
        self._change = client.register_script(_CHANGE)
        self._replace = client.register_script(_REPLACE)
        self._leading = client.register_script(_LEADING)
        self._expect = client.register_script(_EXPECT)

    def change(
        self,
        worker: WorkerKey,
        number: tuple[int, int],
        removed: Sequence[bytes],
        added: Sequence[bytes],
        lease_s: float,
    ) -> Awaitable[Any]:
        """Applies one change and renews the lease; 0 when the one before it is not the last one
        that Redis knows. `number`: of the change before and of this one."""
        arguments = [*number, b"".join(removed), b"".join(added), int(lease_s * 1000)]
        return self._change(keys=[self._held(worker)], args=arguments)

    def replace(
        self,
        worker: WorkerKey,
        number: int,
        part: Sequence[bytes],
        lease_s: float,
        last: bool,
    ) -> Awaitable[Any]:
        """One part of the snapshot of this `number`; the last one makes it the truth."""
        held = self._held(worker)
        arguments = [b"".join(part), int(lease_s * 1000), number if last else ""]
        # A name of its own: what an attempt that failed has left behind expires.
        return self._replace(keys=[held, f"{held}:{number}"], args=arguments)

    def withdraw(self, worker: WorkerKey) -> Awaitable[Any]:
        return self._client.unlink(self._held(worker))

    def leading(
        self, groups: Sequence[tuple[Sequence[bytes], Sequence[WorkerKey]]]
    ) -> Awaitable[bytes]:
        """For the hashes of each group: see `parse_leading`."""
        arguments: list[Any] = [self._period_s]
        for hashes, workers in groups:
            arguments += [b"".join(hashes), " ".join(map(_name, workers))]
        return self._leading(keys=[self._prefix], args=arguments)

    def expect(self, coming: Sequence[tuple[WorkerKey, int, Sequence[bytes]]]) -> Awaitable[Any]:
        """Notes hashes that each worker will hold, unless it has as many noted as are given."""
        arguments: list[Any] = [self._period_s]
        for worker, limit, hashes in coming:
            arguments += [_name(worker), limit, b"".join(hashes)]
        return self._expect(keys=[self._prefix], args=arguments)

    def _held(self, worker: WorkerKey) -> str:
        return f"{self._prefix}:held:{_name(worker)}"


def parse_leading(answer: bytes) -> list[tuple[int, int]]:
    """Leading blocks held and coming, in the order of the workers asked for."""
    pairs = (pair.split(b" ") for pair in answer.split(b";") if pair)
    return [(int(held), int(coming)) for held, coming in pairs]


def _name(worker: WorkerKey) -> str:
    return ":".join(worker)
