"""Requests as OpenTelemetry traces, made from their ledgers when they have ended.

Off unless an OTLP endpoint is set. The router knows the whole timeline on one clock, so it
writes the spans of every process, each under its own service instance; W3C `traceparent` from
the client becomes the parent (https://www.w3.org/TR/trace-context/), and `01` in its flags, or
its absence, asks for the trace. Decode steps are one span: a long answer has thousands.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    Context,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from baton.cluster.ledger import Ledger
from baton.cluster.ledger.tiling import Phase

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
SERVICE = "baton"
MAX_PLACES = 500
EXPORT_TIMEOUT_S = 10


def parent_of(traceparent: str | None) -> SpanContext | None:
    """None when the client sent none, or one that is not valid."""
    match = _TRACEPARENT.fullmatch(traceparent or "")
    if match is None or int(match[1], 16) == 0 or int(match[2], 16) == 0:
        return None
    flags = TraceFlags(int(match[3], 16))
    return SpanContext(int(match[1], 16), int(match[2], 16), is_remote=True, trace_flags=flags)


class Tracing:
    """One exporter; a provider per process that took part, since a resource belongs to it."""

    def __init__(self, endpoint: str) -> None:
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._processor = BatchSpanProcessor(exporter)
        self._providers: dict[str, TracerProvider] = {}

    def export(self, ledger: Ledger) -> None:
        """Hands the spans to the exporter's thread; what does not fit its queue is dropped."""
        parent = parent_of(ledger.traceparent)
        if parent is not None and not parent.trace_flags.sampled:
            return
        outer = Context() if parent is None else set_span_in_context(NonRecordingSpan(parent))
        root = (
            self._provider("router")
            .get_tracer(SERVICE)
            .start_span(
                f"POST {ledger.endpoint}",
                outer,
                SpanKind.SERVER,
                {
                    "http.response.status_code": ledger.status,
                    "gen_ai.request.model": ledger.model,
                    "gen_ai.usage.input_tokens": ledger.num_prompt_tokens,
                    "gen_ai.usage.output_tokens": ledger.num_output_tokens,
                    "baton.request_id": ledger.request_id,
                    "baton.cached_tokens": ledger.num_cached_tokens,
                },
                start_time=_nanoseconds(ledger, ledger.started),
            )
        )
        if ledger.status >= 500:
            root.set_status(Status(StatusCode.ERROR))
        inner = set_span_in_context(root)
        for phase in _folded(ledger.phases):
            span = (
                self._provider(phase.where)
                .get_tracer(SERVICE)
                .start_span(
                    phase.name,
                    inner,
                    attributes={
                        "baton.overlapped": phase.overlapped,
                        **{f"baton.{name}": value for name, value in phase.detail.items()},
                    },
                    start_time=_nanoseconds(ledger, phase.start),
                )
            )
            span.end(_nanoseconds(ledger, phase.end))
        root.end(_nanoseconds(ledger, ledger.ended))

    def close(self) -> None:
        """Sends what is queued."""
        self._processor.shutdown()

    def _provider(self, where: str) -> TracerProvider:
        provider = self._providers.get(where)
        if provider is None:
            if len(self._providers) >= MAX_PLACES:
                self._providers.clear()  # names of workers that are gone
            name = f"{SERVICE}-router" if where == "router" else f"{SERVICE}-worker"
            resource = Resource({"service.name": name, "service.instance.id": where})
            provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            provider.add_span_processor(self._processor)
            self._providers[where] = provider
        return provider


def _folded(phases: list[Phase]) -> Iterator[Phase]:
    """Everything from the first decode step on, a span for each kind at each place."""
    decoding: dict[tuple[str, str], Phase] = {}
    first = next((p.start for p in phases if p.name == "first_decode_step"), float("inf"))
    for phase in phases:
        if phase.start < first:
            yield phase
            continue
        key = phase.name, phase.where
        known = decoding.setdefault(key, replace(phase, detail={"count": 0, "seconds": 0.0}))
        known.end = max(known.end, phase.end)
        known.detail = {
            "count": known.detail["count"] + 1,
            "seconds": known.detail["seconds"] + phase.duration,
        }
    yield from decoding.values()


def _nanoseconds(ledger: Ledger, at: float) -> int:
    return round((ledger.started_at + at - ledger.started) * 1e9)
