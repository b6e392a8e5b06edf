"""What the router measures, in one registry: requests, latencies, queue, hand-offs, retries.

Names are fixed here and nowhere else. TTFT and end-to-end start when the request's body has
been read; TPOT is the mean time per token after the first.
"""

import math
from collections import defaultdict
from functools import partial

from baton.cluster.ledger import Ledger
from baton.cluster.metrics import Metrics
from router.admission import Admission
from router.planner import Planner
from router.predictor import Phase
from router.targets import Targets


class RouterMetrics:
    def __init__(
        self, admission: Admission, planner: Planner, metrics: Metrics | None = None
    ) -> None:
        self._metrics = metrics or Metrics()
        make = self._metrics
        self.requests = make.counter(
            "requests", "Answered requests by endpoint and status.", ("endpoint", "status")
        )
        self.ttft = make.histogram("ttft_seconds", "Time to first token.")
        self.tpot = make.histogram("tpot_seconds", "Mean time per output token after the first.")
        self.e2e = make.histogram("e2e_seconds", "Time from request to the last token.")
        self.prompt_tokens = make.counter("prompt_tokens", "Tokens of served prompts.")
        self.cached_tokens = make.counter("cached_tokens", "Prompt tokens found in a prefix cache.")
        self.output_tokens = make.counter("output_tokens", "Generated tokens sent to clients.")
        self.retries = make.counter("retries", "Attempts repeated on other workers.", ("reason",))
        self.targets = make.counter(
            "targets", "Latency targets of served requests, kept or missed.", ("target", "met")
        )
        self.misses = make.counter(
            "misses", "Missed targets by cause, of requests with phases.", ("target", "cause")
        )
        self.phases = make.histogram(
            "phase_seconds", "Time of each phase that counted, of requests with phases.", ("phase",)
        )
        error = make.gauge(
            "prediction_error", "Mean relative error of the last 200 predictions.", ("phase",)
        )
        for phase in (*Phase, "ttft"):
            error.labels(phase).set_function(partial(_error, planner, phase))
        queue = make.gauge("queue_length", "Requests waiting for room.")
        queue.set_function(lambda: admission.waiting)
        running = make.gauge("requests_in_flight", "Requests admitted and not yet ended.")
        running.set_function(lambda: admission.running)

    def fold(self, ledger: Ledger) -> None:
        """Phases and causes of a request whose timeline was made anyway."""
        sums: dict[str, float] = defaultdict(float)
        for phase in ledger.phases:
            if not phase.overlapped:
                sums[phase.name] += phase.duration
        for name, seconds in sums.items():
            self.phases.labels(name).observe(seconds)
        for miss in ledger.misses or ():
            self.misses.labels(miss.target, miss.cause).inc()

    def count_targets(self, targets: Targets, ttft_s: float, tpot_s: float) -> None:
        """A target that nobody set is neither kept nor missed."""
        for name, target_s, took_s in (
            ("ttft", targets.ttft_s, ttft_s),
            ("tpot", targets.tpot_s, tpot_s),
        ):
            if math.isfinite(target_s):
                self.targets.labels(name, str(took_s <= target_s).lower()).inc()

    def render(self) -> tuple[bytes, str]:
        return self._metrics.render()


def _error(planner: Planner, phase: str) -> float:
    error = planner.mape(phase)
    return math.nan if error is None else error
