"""The test's end of the fault points: who got where, and what happens to them there.

A worker (see `fault_worker`) stands still at each point until it is answered. So a fault hits
at an exact moment, on any machine, without a sleep.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

Action = Callable[[], Awaitable[None]]


@dataclass
class _Plan:
    action: Action
    after: int
    done: asyncio.Event = field(default_factory=asyncio.Event)


class FaultPoints:
    """Points are "prefill.frame", "prefill.commit", "decode.reserve", "decode.frame",
    "decode.commit" and "decode.step". `last` has the worker that was last at each, `passed` how
    often anybody was, `by` how often who."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "points"
        self.last: dict[str, str] = {}
        self.passed: Counter[str] = Counter()
        self.by: Counter[tuple[str, str]] = Counter()
        self._plans: dict[str, _Plan] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._answer, self.path)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    def arm(self, point: str, action: Action, after: int = 0) -> asyncio.Event:
        """Runs `action` once, when `point` has been passed `after` times; tells when it is over."""
        self._plans[point] = plan = _Plan(action, after)
        return plan.done

    def disarm(self) -> None:
        self._plans.clear()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ValueError):
            name, point = (await reader.readline()).decode().split()
            self.last[point] = name
            self.passed[point] += 1
            self.by[name, point] += 1
            plan = self._plans.get(point)
            if plan is not None and plan.after == 0:
                del self._plans[point]
                try:
                    await plan.action()
                finally:
                    plan.done.set()
            elif plan is not None:
                plan.after -= 1
            writer.write(b"g")
            await writer.drain()
        writer.close()
