"""The certificates of `baton up --tls`: an authority that is gone when the cluster is.

Owns a folder that only this user may enter, with one sub-folder per role. Certificates are
renewed while the cluster runs, long before they end.
"""

import asyncio
import tempfile
from pathlib import Path
from types import TracebackType

from baton.cluster.tls.keeper import Keeper


class ThrowAwayCertificates:
    """Made when the context is entered, removed when it is left."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="baton-tls-")
        self.folder = Path(self._folder.name)
        self._keeper = Keeper(self.folder / "authority", self.folder, ("127.0.0.1", "localhost"))
        self._due_s = 0.0

    def __enter__(self) -> "ThrowAwayCertificates":
        self._due_s = self._keeper.renew()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._folder.cleanup()

    async def keep(self) -> None:
        """Renews until cancelled."""
        while True:
            await asyncio.sleep(self._due_s)
            self._due_s = self._keeper.renew()
