"""docker-compose.yml as a project of its own: its containers and what befalls them."""

import asyncio
import json
import os
import secrets
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROJECT = "baton-test"
NETWORK = f"{PROJECT}_default"
COMMAND_TIMEOUT_S = 300.0
BUILD_TIMEOUT_S = 1800.0


def docker(*arguments: str, timeout_s: float = COMMAND_TIMEOUT_S, **variables: str) -> str:
    """What it prints. AssertionError with its complaint."""
    done = subprocess.run(
        ["docker", *arguments],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"docker {' '.join(arguments)}:\n{done.stderr[-4000:]}"
    return done.stdout


class Compose:
    """`compose("up", "--wait")` is `docker compose up --wait` with the variables of the test."""

    def __init__(self, **variables: str) -> None:
        self._variables = {"REDIS_PASSWORD": secrets.token_hex(16), "PORT": "0", **variables}
        files = ["docker-compose.yml", "tests/compose/override.yml"]
        files += ["deploy/docker/wheels.yml"] if os.environ.get("WHEELS") else []
        self._options = ["compose", "--project-name", PROJECT, "--env-file", "/dev/null"]
        self._options += [part for file in files for part in ("--file", file)]

    def changed(self, **variables: str) -> "Compose":
        """The same project with other variables besides."""
        return Compose(**{**self._variables, **variables})

    def __call__(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        return docker(*self._options, *arguments, timeout_s=timeout_s, **self._variables)

    def up(self, *arguments: str) -> None:
        """As users start it; returns when everything is healthy."""
        wait = ("--detach", "--wait", "--wait-timeout", "300")
        self("up", *wait, *arguments, timeout_s=330)

    @property
    def url(self) -> str:
        return f"http://{self('port', 'router', '8000').strip()}"

    def containers(self, service: str) -> list[str]:
        """Ids of those that run."""
        return self("ps", "--quiet", service).split()

    def state(self, container: str) -> dict[str, Any]:
        return json.loads(docker("inspect", container))[0]["State"]

    def healthy(self, service: str, count: int) -> bool:
        states = [self.state(container) for container in self.containers(service)]
        return [state["Health"]["Status"] for state in states] == ["healthy"] * count


def kill(container: str) -> None:
    """All its processes but the first, as a crash would: `docker kill` counts as wanted, and
    the restart policy would let it rest."""
    docker("exec", container, "sh", "-c", "kill -9 -1")


def pause(container: str) -> None:
    docker("pause", container)


def cut(container: str) -> None:
    docker("network", "disconnect", NETWORK, container)


def stay(_: str) -> None:
    """It comes back by itself."""


def unpause(container: str) -> None:
    docker("unpause", container)


def join(container: str) -> None:
    docker("network", "connect", NETWORK, container)


async def eventually(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float) -> None:
    """Waits for what Docker or the router knows and tells nobody."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = await asyncio.to_thread(condition)
            if await found if isinstance(found, Awaitable) else found:
                return
            await asyncio.sleep(0.3)
