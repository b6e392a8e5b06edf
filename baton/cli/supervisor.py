"""Keeps a set of child processes running, and ends them all.

Owns when a child is started, restarted and stopped. A child that ends with code 2 has a wrong
configuration: restarting would not help, so everything stops with its sentence. Any other end
is a restart after a growing wait, up to a rate; beyond it everything stops too. Knows nothing
of what the children do. When `run` returns, no child is left.
"""

import asyncio
import collections
import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.cli.child_process import ChildProcess, ChildSpec, describe_exit

CONFIGURATION_ERROR = 2
Say = Callable[[str, str], None]


@dataclass(frozen=True)
class RestartPolicy:
    """At most `max_restarts` of one child in `window_s`; waits double from first_s to limit_s."""

    first_s: float = 0.5
    limit_s: float = 10.0
    max_restarts: int = 5
    window_s: float = 60.0

    def wait_s(self, recent_restarts: int) -> float:
        return min(self.limit_s, self.first_s * 2.0**recent_restarts)


class Supervisor:
    """`say(name, line)` gets every line of every child, and the supervisor's own as "baton"."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        say: Say,
        policy: RestartPolicy | None = None,
        stop_timeout_s: float = 30.0,
    ) -> None:
        self._specs = list(specs)
        self._say = say
        self._policy = policy or RestartPolicy()
        self._stop_timeout_s = stop_timeout_s
        self._running: dict[str, ChildProcess] = {}
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._failure: str | None = None

    def pids(self) -> dict[str, int]:
        """Process ids of the children alive now, by name."""
        return {name: child.pid for name, child in self._running.items()}

    def stop(self) -> None:
        """Asks for a graceful stop; asking again kills at once."""
        if self._stop.is_set():
            self._kill.set()
        self._stop.set()

    async def run(self) -> str | None:
        """Runs until `stop` (None) or until a child cannot be kept up (the sentence why)."""
        tasks = {spec.name: asyncio.create_task(self._keep(spec)) for spec in self._specs}
        try:
            await self._stop.wait()
            await self._stop_in_stages(tasks)
        finally:
            self._stop.set()
            self._kill.set()
            self._signal(tasks, signal.SIGKILL)
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return self._failure

    async def _keep(self, spec: ChildSpec) -> None:
        restarts: collections.deque[float] = collections.deque()
        while not self._stop.is_set():
            ended = await self._run_once(spec)
            if self._stop.is_set():
                return
            now = time.monotonic()
            while restarts and restarts[0] < now - self._policy.window_s:
                restarts.popleft()
            if ended is None or len(restarts) >= self._policy.max_restarts:
                self._fail(self._failure or self._too_often(spec, len(restarts)))
                return
            wait_s = self._policy.wait_s(len(restarts))
            self._say("baton", f"{spec.name} {ended}; starting it again in {wait_s:.1f} s")
            restarts.append(now)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._stop.wait()

    async def _run_once(self, spec: ChildSpec) -> str | None:
        """Runs a child to its end; how it ended, or None when starting again is no use."""
        try:
            child = await ChildProcess.start(spec)
        except OSError as error:
            self._fail(f"{spec.name} cannot be started: {error}")
            return None
        self._running[spec.name] = child
        if self._stop.is_set():  # asked while the child was being started
            child.signal(signal.SIGKILL if self._kill.is_set() else signal.SIGTERM)
        try:
            code = await child.follow(self._say)
        finally:
            child.signal(signal.SIGKILL)
            self._running.pop(spec.name, None)
        if code == CONFIGURATION_ERROR and not self._stop.is_set():
            reason = child.last_line.removeprefix("baton: ") or "its configuration is wrong"
            self._fail(f"{spec.name} cannot start: {reason}")
            return None
        return describe_exit(code)

    def _too_often(self, spec: ChildSpec, restarts: int) -> str:
        window = f"{self._policy.window_s:.0f} s"
        return f"{spec.name} ended {restarts + 1} times within {window}; giving up."

    def _fail(self, reason: str) -> None:
        if self._failure is None and not self._stop.is_set():
            self._failure = reason
        self._stop.set()

    async def _stop_in_stages(self, tasks: dict[str, "asyncio.Task[None]"]) -> None:
        """SIGTERM, then SIGKILL after the deadline or a second stop; one stage after the other."""
        deadline = time.monotonic() + self._stop_timeout_s
        for stage in sorted({spec.stop_stage for spec in self._specs}):
            names = {spec.name for spec in self._specs if spec.stop_stage == stage}
            await self._end({name: tasks[name] for name in names}, deadline)

    async def _end(self, stage: dict[str, "asyncio.Task[None]"], deadline: float) -> None:
        self._signal(stage, signal.SIGTERM)
        killed = asyncio.create_task(self._kill.wait())
        gone = asyncio.gather(*stage.values(), return_exceptions=True)
        both: set[asyncio.Future[Any]] = {killed, gone}
        await asyncio.wait(
            both,
            timeout=max(0.0, deadline - time.monotonic()),
            return_when=asyncio.FIRST_COMPLETED,
        )
        killed.cancel()
        if not gone.done():
            names = ", ".join(sorted(name for name in stage if name in self._running))
            self._say("baton", f"killing {names}")
            self._kill.set()
            self._signal(stage, signal.SIGKILL)
        await gone

    def _signal(self, stage: dict[str, "asyncio.Task[None]"], number: signal.Signals) -> None:
        for name in stage:
            if name in self._running:
                self._running[name].signal(number)
