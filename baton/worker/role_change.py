"""How one life of a worker ends for another role: drained first, then cut off when time is up.

What is cut off goes on elsewhere, as after a death. Until the drain has ended nothing is decided:
if nobody waits for the change any more, the worker takes requests as before.
"""

import asyncio
from collections.abc import Collection

from baton.cluster.tls import TlsFolder
from baton.cluster.workers import Role
from baton.worker.status import WorkerStatus


class RoleRefused(Exception):
    """Why this worker cannot have that role, as a sentence."""


class RoleChange:
    """`roles`: those that the process can have. `role`: the one to go on in, once there is one."""

    def __init__(
        self, status: WorkerStatus, roles: Collection[Role] = (), tls: TlsFolder | None = None
    ) -> None:
        self.role: Role | None = None
        self._status = status
        self._roles = roles
        self._tls = tls
        self._begun = False
        self._due = asyncio.Event()

    async def begin(self, role: Role, timeout_s: float) -> bool:
        """Ends this life when nothing runs any more, or after `timeout_s`; whether all had ended.
        Raises RoleRefused."""
        self._check(role)
        activity, drained_before = self._status.activity, self._status.activity.draining
        self._begun = True
        activity.stop_taking()
        self._status.announce()
        try:
            drained = await activity.idle(timeout_s)
        except asyncio.CancelledError:
            self._begun = False
            if not drained_before:
                activity.take_again()
                self._status.announce()
            raise
        self.role = role
        self._due.set()
        return drained

    async def due_before(self, stop: asyncio.Event) -> bool:
        """Waits until this life is to end, for another role or by `stop`; False for the latter."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._due, stop)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not stop.is_set()

    def _check(self, role: Role) -> None:
        if self._status.role is role:
            raise RoleRefused(f"it is a {role} worker already")
        if role not in self._roles:
            raise RoleRefused(
                f"its process cannot be a {role} worker; start it with `baton prefill`"
            )
        if self._begun:
            raise RoleRefused("it is changing its role already")
        if role is Role.PREFILL and self._tls is not None and self._tls.role != role:
            raise RoleRefused(
                f"its certificate is for {self._tls.role or 'no role'}, and decode workers take KV "
                "only from one for prefill"
            )
