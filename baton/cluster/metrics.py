"""Prometheus metrics of one process, in a registry of its own that the caller passes around.

Owns names (`baton_` prefix) and histogram buckets; knows no metric by itself. Nothing touches
prometheus_client's global registry, so two workers can live in one process.
"""

from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

PREFIX = "baton"
# Half a millisecond to two minutes: token latencies and whole requests on one scale.
LATENCY_BUCKETS_S = tuple(
    round(step * 10**power, 6) for power in range(-4, 2) for step in (5, 10, 25)
)


class Metrics:
    """Makes metrics in one registry and renders them."""

    def __init__(self, process_collectors: bool = False) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        if process_collectors:
            ProcessCollector(registry=self.registry)
            PlatformCollector(registry=self.registry)

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, help, labels, namespace=PREFIX, registry=self.registry)

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(name, help, labels, namespace=PREFIX, registry=self.registry)

    def histogram(
        self,
        name: str,
        help: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = LATENCY_BUCKETS_S,
    ) -> Histogram:
        return Histogram(
            name, help, labels, namespace=PREFIX, registry=self.registry, buckets=buckets
        )

    def render(self) -> tuple[bytes, str]:
        """The exposition text and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
