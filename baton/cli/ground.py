"""What the processes of `baton up` stand on: this machine, or whatever another Ground says.

Plain data and functions; knows nothing of what stands there.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from baton.cli.child_process import ChildProcess
from baton.cli.supervisor import RestartPolicy, Say, Start, Supervisor
from baton.cli.up_plan import Site
from baton.cluster.redis_server import EmbeddedRedis

Helpers = list[Coroutine[Any, Any, None]]


def _no_helpers(supervisor: Supervisor, site: Site, say: Say) -> Helpers:
    return []


def _nothing() -> None:
    pass


def _as_it_is(site: Site) -> Site:
    return site


@dataclass(frozen=True)
class Ground:
    """`helpers` run beside the supervisor and end with it; `close` is called when all has ended."""

    redis: Callable[[], EmbeddedRedis] = EmbeddedRedis
    settle: Callable[[Site], Site] = _as_it_is
    start: Start = ChildProcess.start
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    helpers: Callable[[Supervisor, Site, Say], Helpers] = _no_helpers
    close: Callable[[], None] = _nothing


THIS_MACHINE = Ground()
