"""Keeps the certificates of a whole cluster fresh: one folder with a sub-folder per role.

`ca.crt` beside them comes last, so where it stands everything stands.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from baton.cluster.errors import BatonError
from baton.cluster.tls import authority
from baton.cluster.tls.authority import CA_KEY, Issued, Order
from baton.cluster.tls.folder import CA
from baton.cluster.tls.peers import ROLES

AUTHORITY_LIFE = timedelta(days=3650)


@dataclass(frozen=True)
class Keeper:
    """`authority` is made when there is none."""

    authority: Path
    folder: Path
    hosts: Sequence[str]
    life: timedelta = timedelta(hours=24)

    def renew(self) -> float:
        """Issues what is missing, due or for other hosts; seconds until the next one is due."""
        if not (self.authority / CA_KEY).exists():
            authority.create(self.authority, AUTHORITY_LIFE)
        now = datetime.now(UTC)
        for role in ROLES:
            if not self._holds(role, now):
                order = Order(role, tuple(self.hosts), self.life)
                authority.issue(self.authority, self.folder / role, order)
        authority.publish(self.authority / CA, self.folder / CA)
        due = min(authority.read(self.folder / role).due for role in ROLES)
        return max(1.0, (due - now).total_seconds())

    def _holds(self, role: str, now: datetime) -> bool:
        try:
            found: Issued = authority.read(self.folder / role)
        except BatonError:
            return False
        same = found.order.role == role and set(found.order.hosts) == set(self.hosts)
        return same and found.order.life == self.life and not found.is_due(now)
