"""`baton up` as a child of the test: its lines, its processes, its end."""

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil

READY = re.compile(r"Baton is ready at (http://\S+)")
READY_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 40.0


class Up:
    """A running `baton up`; `lines` grows while it runs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""
        self._grew = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode(errors="replace").rstrip())
            self._grew.set()
        self._grew.set()

    async def line(self, wanted: Callable[[str], object], timeout_s: float, since: int = 0) -> str:
        """The first line from number `since` on that is wanted."""
        async with asyncio.timeout(timeout_s):
            seen = since
            while True:
                for text in self.lines[seen:]:
                    if wanted(text):
                        return text
                assert not self._reading.done(), f"it ended: {self.lines[-5:]}"
                seen = len(self.lines)
                self._grew.clear()
                await self._grew.wait()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, module: str) -> psutil.Process:
        (found,) = [c for c in self.children() if module in " ".join(c.cmdline())]
        return found

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """The exit code; fails when it does not end by itself."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(STOP_TIMEOUT_S):
            code = await self.process.wait()
            await self._reading
        return code


@contextlib.asynccontextmanager
async def baton_up(*flags: str) -> AsyncIterator[Up]:
    """Ready to serve. Whatever happens, nothing of it is left afterwards."""
    process = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).parent / "baton"), "up", "--port", "0", *flags),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    up = Up(process)
    family: list[psutil.Process] = []
    try:
        ready = await up.line(READY.search, READY_TIMEOUT_S)
        match = READY.search(ready)
        assert match is not None
        up.url = match[1]
        family = up.children()
        yield up
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [*up.children(), *family]
        if process.returncode is None:
            process.kill()
            await process.wait()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        await up._reading
