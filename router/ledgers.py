"""Where ended requests go: the recent ones in memory, and all of them to a log if one is set."""

from baton.cluster.ledger import Ledger, Recent
from baton.cluster.ledger.log import LedgerLog
from baton.cluster.settings import RouterSettings


class Ledgers:
    def __init__(self, settings: RouterSettings) -> None:
        self.recent = Recent(settings.ledger_recent)
        path = settings.ledger_log
        self._log = LedgerLog(path, settings.ledger_log_bytes) if path else None

    def add(self, ledger: Ledger) -> None:
        """A request that has ended. One that was refused before its queue has no timeline."""
        if not ledger.trails:
            return
        self.recent.add(ledger)
        if self._log is not None:
            self._log.write(ledger)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
