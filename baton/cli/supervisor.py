"""Keeps a set of child processes running, and ends them all.

Owns when a child is started, restarted and stopped. A child that ends with code 2 has a wrong
configuration: restarting would not help, so everything stops with its sentence. Any other end
is a restart after a growing wait, up to a rate; beyond it everything stops too. Children may be
added and removed meanwhile. Knows nothing of what the children do, nor where they run: `start`
makes them. When `run` returns, no child is left.
"""

import asyncio
import collections
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.cli.child_process import ChildProcess, ChildSpec, describe_exit

CONFIGURATION_ERROR = 2
Say = Callable[[str, str], None]


class Child(Protocol):
    """What is kept running; `ChildProcess` is one on this machine."""

    last_line: str

    @property
    def pid(self) -> int: ...
    async def follow(self, say: Say) -> int: ...
    def signal(self, number: signal.Signals) -> None: ...


Start = Callable[[ChildSpec], Awaitable[Child]]


@dataclass(frozen=True)
class RestartPolicy:
    """At most `max_restarts` of one child in `window_s` (None: any number); waits double from
    first_s to limit_s."""

    first_s: float = 0.5
    limit_s: float = 10.0
    max_restarts: int | None = 5
    window_s: float = 60.0

    def wait_s(self, recent_restarts: int) -> float:
        return min(self.limit_s, self.first_s * 2.0 ** min(recent_restarts, 30))

    def too_often(self, recent_restarts: int) -> bool:
        return self.max_restarts is not None and recent_restarts >= self.max_restarts


@dataclass
class _Kept:
    """A child that is wanted until `leave` is set; `task` keeps it."""

    spec: ChildSpec
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None


class Supervisor:
    """`say(name, line)` gets every line of every child, and the supervisor's own as "baton"."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        say: Say,
        policy: RestartPolicy | None = None,
        stop_timeout_s: float = 30.0,
        start: Start = ChildProcess.start,
    ) -> None:
        self._kept = {spec.name: _Kept(spec) for spec in specs}
        self._say = say
        self._policy = policy or RestartPolicy()
        self._stop_timeout_s = stop_timeout_s
        self._start = start
        self._running: dict[str, Child] = {}
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._failure: str | None = None
        self._begun = False

    def pids(self) -> dict[str, int]:
        """Process ids of the children alive now, by name."""
        return {name: child.pid for name, child in self._running.items()}

    def names(self) -> list[str]:
        """Of the children that are wanted, and of those on their way out."""
        return list(self._kept)

    def stop(self) -> None:
        """Asks for a graceful stop; asking again kills at once."""
        if self._stop.is_set():
            self._kill.set()
        self._stop.set()

    async def run(self) -> str | None:
        """Runs until `stop` (None) or until a child cannot be kept up (the sentence why)."""
        self._begun = True
        for kept in self._kept.values():
            kept.task = asyncio.create_task(self._keep(kept))
        try:
            await self._stop.wait()
            await self._stop_in_stages()
        finally:
            self._stop.set()
            self._kill.set()
            names = list(self._kept)
            self._leave(names, signal.SIGKILL)
            await asyncio.gather(*self._tasks(names), return_exceptions=True)
        return self._failure

    def add(self, spec: ChildSpec) -> None:
        """One more child, before or while `run` runs; its name must be free."""
        if self._stop.is_set():
            return
        kept = self._kept[spec.name] = _Kept(spec)
        if self._begun:
            kept.task = asyncio.create_task(self._keep(kept))

    async def remove(self, name: str) -> None:
        """Ends one child for good, as gracefully as `stop` does; returns when it is gone."""
        await self._end([name], time.monotonic() + self._stop_timeout_s)
        self._kept.pop(name, None)

    async def _keep(self, kept: _Kept) -> None:
        spec, restarts = kept.spec, collections.deque[float]()
        while not self._unwanted(kept):
            ended = await self._run_once(kept)
            if self._unwanted(kept):
                return
            now = time.monotonic()
            while restarts and restarts[0] < now - self._policy.window_s:
                restarts.popleft()
            if ended is None or self._policy.too_often(len(restarts)):
                self._fail(self._failure or self._too_often(spec, len(restarts)))
                return
            wait_s = self._policy.wait_s(len(restarts))
            self._say("baton", f"{spec.name} {ended}; starting it again in {wait_s:.1f} s")
            restarts.append(now)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await kept.leave.wait()

    async def _run_once(self, kept: _Kept) -> str | None:
        """Runs a child to its end; how it ended, or None when starting again is no use."""
        spec = kept.spec
        try:
            child = await self._start(spec)
        except OSError as error:
            self._fail(f"{spec.name} cannot be started: {error}")
            return None
        self._running[spec.name] = child
        if kept.leave.is_set():  # asked while the child was being started
            child.signal(signal.SIGKILL if self._kill.is_set() else signal.SIGTERM)
        try:
            code = await child.follow(self._say)
        finally:
            child.signal(signal.SIGKILL)
            self._running.pop(spec.name, None)
        if code == CONFIGURATION_ERROR and not self._unwanted(kept):
            reason = child.last_line.removeprefix("baton: ") or "its configuration is wrong"
            self._fail(f"{spec.name} cannot start: {reason}")
            return None
        return describe_exit(code)

    def _unwanted(self, kept: _Kept) -> bool:
        return self._stop.is_set() or kept.leave.is_set()

    def _too_often(self, spec: ChildSpec, restarts: int) -> str:
        window = f"{self._policy.window_s:.0f} s"
        return f"{spec.name} ended {restarts + 1} times within {window}; giving up."

    def _fail(self, reason: str) -> None:
        if self._failure is None and not self._stop.is_set():
            self._failure = reason
        self._stop.set()

    async def _stop_in_stages(self) -> None:
        """SIGTERM, then SIGKILL after the deadline or a second stop; one stage after the other."""
        deadline = time.monotonic() + self._stop_timeout_s
        for stage in sorted({kept.spec.stop_stage for kept in self._kept.values()}):
            names = [name for name, kept in self._kept.items() if kept.spec.stop_stage == stage]
            if not await self._end(names, deadline):
                self._kill.set()

    async def _end(self, names: list[str], deadline: float) -> bool:
        """Whether they went by themselves."""
        self._leave(names, signal.SIGTERM)
        killed = asyncio.create_task(self._kill.wait())
        gone = asyncio.gather(*self._tasks(names), return_exceptions=True)
        both: set[asyncio.Future[Any]] = {killed, gone}
        await asyncio.wait(
            both,
            timeout=max(0.0, deadline - time.monotonic()),
            return_when=asyncio.FIRST_COMPLETED,
        )
        killed.cancel()
        went = gone.done()
        if not went:
            left = ", ".join(sorted(name for name in names if name in self._running))
            self._say("baton", f"killing {left}")
            self._leave(names, signal.SIGKILL)
        await gone
        return went

    def _tasks(self, names: list[str]) -> list["asyncio.Task[None]"]:
        tasks = [self._kept[name].task for name in names if name in self._kept]
        return [task for task in tasks if task is not None]

    def _leave(self, names: list[str], number: signal.Signals) -> None:
        for name in names:
            if name in self._kept:
                self._kept[name].leave.set()
            if name in self._running:
                self._running[name].signal(number)
