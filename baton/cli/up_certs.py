"""The certificates of `baton up --tls`: an authority that is gone when the cluster is.

Owns a folder that only this user may enter, with one sub-folder per role. Certificates are
renewed while the cluster runs, long before they end.
"""

import asyncio
import tempfile
from datetime import timedelta
from pathlib import Path
from types import TracebackType

from baton.cluster.tls import authority
from baton.cluster.tls.peers import ROLES

LIFE = timedelta(hours=24)
HOSTS = ("127.0.0.1", "localhost")


class ThrowAwayCertificates:
    """Made when the context is entered, removed when it is left."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="baton-tls-")
        self.folder = Path(self._folder.name)

    def __enter__(self) -> "ThrowAwayCertificates":
        authority.create(self.folder, timedelta(days=3650))
        self.issue()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._folder.cleanup()

    def issue(self) -> None:
        for role in ROLES:
            order = authority.Order(role, HOSTS, LIFE)
            authority.issue(self.folder, self.folder / role, order)

    async def keep(self) -> None:
        """Renews until cancelled."""
        while True:
            await asyncio.sleep(LIFE.total_seconds() / 2)
            self.issue()
