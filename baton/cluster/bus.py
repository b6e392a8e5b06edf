"""Questions among the routers of one cluster, over Redis' publish and subscribe.

Every router answers every other one's questions from what it holds in memory; nothing is stored.
The asker waits for all routers that live, but no longer than its deadline, and says who is missing.
Bounded: questions in the air, answers in the making, the size of an answer. Without Redis each
router has its own answer only.
"""

import asyncio
import logging
import secrets
import zlib
from collections.abc import Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson

from baton.cluster.background import background
from baton.cluster.errors import RegistryUnavailable
from baton.cluster.redis_client import messages
from baton.cluster.redis_link import RedisLink
from baton.cluster.registry.backoff import Backoff

DEADLINE_S = 2.0
SEND_S = 2.0
MAX_ASKED = 16
MAX_ANSWERING = 4
MAX_ANSWER_BYTES = 4 << 20
_log = logging.getLogger(__name__)


@dataclass
class Told:
    """Answers by router; `missing`: a sentence for each that gave none."""

    answers: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


@dataclass
class _Asked:
    """`packed`: answers as they came."""

    waited_for: set[str]
    packed: dict[str, bytes] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, router: str, packed: bytes, problem: str | None) -> None:
        if problem is None:
            self.packed[router] = packed
        else:
            self.missing.append(f"router {router}: {problem}")
        self.waited_for.discard(router)
        if not self.waited_for:
            self.complete.set()

    def told(self) -> Told:
        told = Told(missing=self.missing)
        for router, packed in self.packed.items():
            try:
                told.answers[router] = orjson.loads(zlib.decompress(packed))
            except (ValueError, zlib.error) as error:
                told.missing.append(f"router {router}: its answer cannot be read: {error}")
        return told


class Bus:
    """`others` names the live routers beside this one. `answer` is set before `start`: it takes a
    question and gives the answer, both as JSON values, or raises ValueError with a reason. Answers
    are large: they are packed and unpacked on a thread."""

    def __init__(
        self,
        link: RedisLink,
        router_id: str,
        others: Callable[[], Awaitable[Collection[str]]],
        namespace: str = "baton",
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._link = link
        self._id = router_id
        self._others = others
        self._questions = f"{{{namespace}}}:asked"
        self._answers = f"{{{namespace}}}:told:"
        self._deadline_s = deadline_s
        self._asked: dict[str, _Asked] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._listening: asyncio.Task[None] | None = None
        self.answer: Callable[[Any], Awaitable[Any]] = _nothing

    async def ask(self, question: Any) -> Told:
        """Never raises; takes at most the deadline and a little."""
        if len(self._asked) >= MAX_ASKED:
            return Told(missing=["other routers: too many questions at once"])
        name = secrets.token_hex(8)
        try:
            asked = _Asked(set(await self._others()))
            if not asked.waited_for:
                return Told()
            self._asked[name] = asked
            await self._publish(
                self._questions, {"name": name, "from": self._id, "question": question}
            )
            async with asyncio.timeout(self._deadline_s):
                await asked.complete.wait()
        except RegistryUnavailable as error:
            return Told(missing=[f"other routers: {error}"])
        except TimeoutError:
            for router in sorted(asked.waited_for):
                asked.missing.append(f"router {router}: no answer within {self._deadline_s:g} s")
        finally:
            self._asked.pop(name, None)
        return await asyncio.to_thread(asked.told)

    async def start(self) -> None:
        self._listening = background(self._listen(), name="bus")

    async def stop(self) -> None:
        tasks = [*self._answering, *([self._listening] if self._listening else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self) -> None:
        backoff = Backoff()
        channels = (self._questions, self._answers + self._id)
        while True:
            try:
                async with aclosing(messages(self._link.client, *channels)) as heard:
                    async for channel, data in heard:
                        backoff.reset()
                        if channel:
                            self._try_to_hear(channel, data)
            except RegistryUnavailable:
                await asyncio.sleep(backoff.next_s())

    def _try_to_hear(self, channel: str, data: bytes) -> None:
        try:
            self._hear(channel == self._questions, data)
        except (ValueError, LookupError, TypeError, zlib.error) as error:
            _log.warning("on %s: %r is no message of a router: %s", channel, data[:80], error)

    def _hear(self, is_question: bool, data: bytes) -> None:
        head, _, packed = data.partition(b"\n")
        message = orjson.loads(head)
        if not is_question:
            asked = self._asked.get(message["name"])
            if asked is not None:
                asked.take(message["from"], packed, message["problem"])
        elif message["from"] != self._id and len(self._answering) < MAX_ANSWERING:
            task = background(self._reply(message), name="bus-reply")
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _reply(self, asked: dict[str, Any]) -> None:
        head, packed = {"name": asked["name"], "from": self._id, "problem": None}, b""
        try:
            packed = await asyncio.to_thread(_pack, await self.answer(asked["question"]))
            if len(packed) > MAX_ANSWER_BYTES:
                raise ValueError(f"its answer of {len(packed) >> 20} MiB is too large")
        except ValueError as error:
            head["problem"], packed = str(error), b""
        try:
            await self._publish(self._answers + asked["from"], head, packed)
        except RegistryUnavailable as error:
            _log.warning("could not answer router %s: %s", asked["from"], error)

    async def _publish(self, channel: str, head: dict[str, Any], packed: bytes = b"") -> None:
        client = self._link.client
        data = orjson.dumps(head) + b"\n" + packed
        await self._link.call(lambda: client.publish(channel, data), SEND_S)


async def _nothing(question: Any) -> None:
    return None


def _pack(content: Any) -> bytes:
    return zlib.compress(orjson.dumps(content), 1)
