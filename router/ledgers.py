"""Where ended requests go: the recent ones in memory, all of them into reports, and to a log if
one is set."""

import time
from collections.abc import Iterable
from typing import Any

from baton.cluster.ledger import Ledger, Recent
from baton.cluster.ledger.log import LedgerLog
from baton.cluster.reports import Collector, Window
from baton.cluster.settings import RouterSettings
from baton.cluster.workers import WorkerRecord

SAMPLE_POOLS_S = 1.0


class Ledgers:
    def __init__(self, settings: RouterSettings) -> None:
        self.recent = Recent(settings.ledger_recent)
        self.window = Window()
        self._collector = Collector(self.window)
        self._sampled_at = 0.0
        path = settings.ledger_log
        self._log = LedgerLog(path, settings.ledger_log_bytes) if path else None

    def add(self, ledger: Ledger) -> None:
        """A request that has ended. One that was refused before its queue has no timeline."""
        if not ledger.trails:
            return
        self.recent.add(ledger)
        self._collector.add(ledger, time.time())
        if self._log is not None:
            self._collector.explain(ledger)
            self._log.write(ledger)

    def find(self, name: str) -> dict[str, Any] | None:
        """A recent request with its phases and the causes of what it missed."""
        ledger = self.recent.find(name)
        if ledger is None:
            return None
        self._collector.explain(ledger)
        return ledger.as_json()

    def sample_pools(self, workers: Iterable[WorkerRecord]) -> None:
        """At most once a second."""
        now = time.time()
        if now - self._sampled_at >= SAMPLE_POOLS_S:
            self._sampled_at = now
            used = {w.worker_id: 1 - w.load.free_blocks / max(w.num_blocks, 1) for w in workers}
            self.window.sample_pools(used, now)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
