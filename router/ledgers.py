"""Where ended requests go: the recent ones in memory, all of them into reports, and to a log and
a collector of traces if they are set."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from baton.cluster.errors import SettingsError
from baton.cluster.ledger import Ledger, Recent
from baton.cluster.ledger.log import LedgerLog
from baton.cluster.reports import Collector, Window
from baton.cluster.settings import RouterSettings
from baton.cluster.workers import WorkerRecord
from router.metrics import RouterMetrics

if TYPE_CHECKING:
    from router.tracing import Tracing

SAMPLE_POOLS_S = 1.0


class Ledgers:
    def __init__(self, settings: RouterSettings, metrics: RouterMetrics) -> None:
        self.recent = Recent(settings.ledger_recent)
        self.window = Window()
        self._collector = Collector(self.window, metrics.fold)
        self._sampled_at = 0.0
        self._tracing = _tracing(settings.otlp_endpoint)
        path = settings.ledger_log
        self._log = LedgerLog(path, settings.ledger_log_bytes) if path else None

    def add(self, ledger: Ledger) -> None:
        """A request that has ended. One that was refused before its queue has no timeline."""
        if not ledger.trails:
            return
        self.recent.add(ledger)
        self._collector.add(ledger, time.time())
        if self._tracing is not None:
            self._tracing.export(ledger)
        if self._log is not None:
            self._collector.explain(ledger)
            self._log.write(ledger)

    def find(self, name: str, tenant: str | None) -> dict[str, Any] | None:
        """A recent request, of one tenant or of all, with its phases and the causes of what it
        missed."""
        ledger = self.recent.find(name, tenant)
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
        """Writes and sends what is queued; may take as long as the collector does."""
        if self._tracing is not None:
            self._tracing.close()
        if self._log is not None:
            self._log.close()


def _tracing(endpoint: str | None) -> "Tracing | None":
    """Raises SettingsError when traces are wanted and the packages for them are not there."""
    if endpoint is None:
        return None
    try:
        from router.tracing import Tracing
    except ImportError as error:
        raise SettingsError(
            f"--otlp-endpoint needs the packages of the extra 'otel' ({error})."
        ) from error
    return Tracing(endpoint)
