"""A worker's metrics for Prometheus, read when they are asked for; off without --metrics-port.

Names and units follow its conventions; every series has the labels model, role and worker. They
are served on a thread of prometheus_client, so a scrape costs the event loop nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.cluster.errors import SettingsError
from baton.worker.status import WorkerStatus

LABELS = ("model", "role", "worker")
_COUNTERS = {
    "handoffs": "Hand-offs committed.",
    "handoffs_failed": "Hand-offs that failed or were cancelled after their first frame.",
    "prefill_tokens_computed": "Tokens whose KV was computed by prefilling.",
    "prefill_tokens_cached": "Prompt tokens taken from the prefix cache.",
    "tokens_generated": "Tokens generated.",
    "preemptions": "Sequences preempted for lack of blocks.",
    "tokens_recomputed": "Tokens computed again after a preemption.",
    "tokens_drafted": "Tokens drafted and checked by speculative decoding.",
    "tokens_accepted": "Drafted tokens that were right.",
    "blocks_reused": "Blocks of prefixes found in the cache and used.",
    "blocks_evicted": "Cached blocks given up for new ones.",
    "pins_broken": "Pinned blocks given up because everything else was held.",
    "blocks_transferred": "KV blocks sent or received.",
    "bytes_transferred": "KV payload bytes sent or received.",
}


class WorkerCollector(Collector):
    def __init__(self, status: WorkerStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        record = self._status.record()
        load, labels = record.load, (record.model, str(record.role), record.worker_id)
        gauges = {
            "running_sequences": ("Sequences in the running batch.", load.running),
            "waiting_sequences": ("Sequences waiting for compute.", load.waiting),
            "handoffs_in_flight": ("Hand-offs reserved or in flight.", load.handoffs_in_flight),
            "draining": ("1 while it takes no new requests.", int(load.draining)),
        }
        for name, (help_text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"baton_worker_{name}", help_text, labels=LABELS)
            gauge.add_metric(labels, value)
            yield gauge
        yield self._blocks(labels)
        pinned = GaugeMetricFamily(
            "baton_worker_pinned_blocks", "Cached blocks that a pin covers.", labels=LABELS
        )
        pinned.add_metric(labels, self._status.parts.engine.blocks.num_pinned)
        yield pinned
        counters = self._status.counters()
        for name, help_text in _COUNTERS.items():
            counter = CounterMetricFamily(f"baton_worker_{name}", help_text, labels=LABELS)
            counter.add_metric(labels, getattr(counters, name))
            yield counter

    def _blocks(self, labels: tuple[str, ...]) -> Metric:
        """`cached` ones are free too: they may be evicted."""
        record = self._status.record()
        load = record.load
        blocks = GaugeMetricFamily(
            "baton_worker_kv_blocks", "KV blocks by state.", labels=(*LABELS, "state")
        )
        states = {
            "used": record.num_blocks - load.free_blocks,
            "cached": load.cached_blocks,
            "empty": load.free_blocks - load.cached_blocks,
        }
        for state, count in states.items():
            blocks.add_metric((*labels, state), count)
        return blocks


@contextmanager
def exposed(status: WorkerStatus) -> Iterator[int | None]:
    """Serves /metrics while the context lasts; its port. Raises SettingsError."""
    settings = status.settings
    if settings.metrics_port is None:
        yield None
        return
    registry = CollectorRegistry()
    registry.register(WorkerCollector(status))
    try:
        server, thread = start_http_server(settings.metrics_port, settings.host, registry)
    except OSError as error:
        raise SettingsError(
            f"Cannot serve metrics on {settings.host}:{settings.metrics_port}: {error.strerror}; "
            "choose another --metrics-port."
        ) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
