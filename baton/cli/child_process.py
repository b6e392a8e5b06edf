"""One child process: its life from start to exit, its output as lines.

Owns the process and its group; the child has a session of its own, so a terminal's Ctrl-C
reaches only the parent, and dies with the parent. Knows nothing of restarts.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.cluster.child import die_with_parent

LINE_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True)
class ChildSpec:
    """How to start a child. Children of a lower `stop_stage` are stopped, and gone, first."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    stop_stage: int = 0


class ChildProcess:
    """A started child. `last_line` is the last non-empty line it wrote."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process) -> None:
        self.spec = spec
        self.last_line = ""
        self._process = process

    @classmethod
    async def start(cls, spec: ChildSpec) -> "ChildProcess":
        process = await asyncio.create_subprocess_exec(
            *spec.argv,
            env={**os.environ, **spec.env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=LINE_LIMIT_BYTES,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        return cls(spec, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def follow(self, say: Callable[[str, str], None]) -> int:
        """Hands every line to `say(name, line)` until the child has ended; its exit code."""
        output = asyncio.create_task(self._read(say))
        code = await self._process.wait()
        # A grandchild may hold the pipe open: what it still writes is not worth waiting for.
        await asyncio.wait({output}, timeout=1.0)
        output.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await output
        self.signal(signal.SIGKILL)
        return code

    def signal(self, number: signal.Signals) -> None:
        """Sends to the child's whole group; harmless when it is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    async def _read(self, say: Callable[[str, str], None]) -> None:
        stream = self._process.stdout
        while stream is not None:
            try:
                raw = await stream.readline()
            except ValueError:
                say(self.spec.name, "(a line of more than 1 MiB was left out)")
                continue
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            self.last_line = line or self.last_line
            say(self.spec.name, line)


def describe_exit(code: int) -> str:
    """ "was killed by SIGKILL" or "ended with code 1"."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
