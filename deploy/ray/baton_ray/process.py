"""The actor around one process of Baton: starts it on its node, says how it ended.

Owns the process, which dies with the actor. Decides nothing: restarts and placement are the
supervisor's, what the process does is its own.
"""

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

import ray
from ray.util import get_node_ip_address

from baton.cli.child_process import ChildProcess, ChildSpec


@dataclass(frozen=True)
class Place:
    """Where a process runs."""

    host: str
    node_id: str
    pid: int


@ray.remote(max_restarts=0, max_task_retries=0)
class Process:
    """Lines that the process writes go to Ray's log of this actor, and so to the driver.
    `settings`: BATON_* variables of the driver."""

    def __init__(self, spec: ChildSpec, settings: Mapping[str, str]) -> None:
        self._host = get_node_ip_address()
        environment = {**settings, "BATON_HOST": self._host, **spec.env}
        # The interpreter of this node: it may lie elsewhere than the driver's.
        self._spec = replace(spec, argv=(sys.executable, *spec.argv[1:]), env=environment)
        self._child: ChildProcess | None = None

    def __repr__(self) -> str:
        return self._spec.name

    async def start(self) -> Place:
        self._child = await ChildProcess.start(self._spec)
        node_id = ray.get_runtime_context().get_node_id()
        return Place(self._host, node_id, self._child.pid)

    async def wait(self) -> tuple[int, str]:
        """The exit code and the last line, once the process has ended."""
        assert self._child is not None, "start it first"
        code = await self._child.follow(lambda _, line: print(line, flush=True))
        return code, self._child.last_line

    async def signal(self, number: int) -> None:
        if self._child is not None:
            self._child.signal(signal.Signals(number))


def driver_settings() -> dict[str, str]:
    """What a child on this machine would inherit."""
    return {name: value for name, value in os.environ.items() if name.startswith("BATON_")}
