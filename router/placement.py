"""Which workers serve a request: a pure function of facts, a worker snapshot and counts.

No I/O, no clock, no state. A pair shares one KV layout, is not draining and can hold the
request at its longest. Policies implement `Placement`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from baton.cluster.errors import WorkerUnavailable
from baton.cluster.workers import Role, WorkerRecord


@dataclass(frozen=True)
class RequestFacts:
    """What placement may know of a request."""

    num_prompt_tokens: int
    max_tokens: int
    n: int

    @property
    def needs_decode(self) -> bool:
        """A single token is drawn by prefill."""
        return self.max_tokens > 1


@dataclass(frozen=True)
class Pair:
    """`prefill=None`: decode prefills itself. `decode=None`: prefill alone is enough."""

    prefill: WorkerRecord | None
    decode: WorkerRecord | None


class NoWorker(WorkerUnavailable):
    """No live worker of a role can take the request."""

    def __init__(self, role: Role) -> None:
        super().__init__(f"No {role} worker is available.", retry_after_s=1.0)
        self.role = role


class Placement(Protocol):
    def choose(
        self,
        facts: RequestFacts,
        workers: Sequence[WorkerRecord],
        in_flight: Mapping[str, int],
    ) -> Pair:
        """Raises NoWorker. `in_flight`: this router's own choices per worker id."""
        ...


def _load(worker: WorkerRecord, in_flight: Mapping[str, int]) -> tuple[float, str]:
    """Records lag by a heartbeat, own counts do not; the larger one is nearer the truth."""
    load = worker.load
    reported = load.waiting + load.running + load.handoffs_in_flight
    busy = max(reported, in_flight.get(worker.worker_id, 0))
    return busy / max(worker.max_num_seqs, 1), worker.worker_id


class LeastLoaded:
    """The least loaded decode worker, then the least loaded prefill worker that matches it."""

    def __init__(self, when_no_prefill: Literal["refuse", "decode"] = "refuse") -> None:
        self._decode_may_prefill = when_no_prefill == "decode"

    def choose(
        self,
        facts: RequestFacts,
        workers: Sequence[WorkerRecord],
        in_flight: Mapping[str, int],
    ) -> Pair:
        def ordered(role: Role, tokens: int) -> list[WorkerRecord]:
            fit = [w for w in workers if w.role is role and _fits(w, tokens)]
            return sorted(fit, key=lambda w: _load(w, in_flight))

        prefills = ordered(Role.PREFILL, facts.num_prompt_tokens)
        if prefills and not facts.needs_decode:
            return Pair(prefills[0], None)
        decodes = ordered(Role.DECODE, facts.num_prompt_tokens + facts.max_tokens)
        if not decodes:
            raise NoWorker(Role.DECODE if facts.needs_decode else Role.PREFILL)
        for decode in decodes:
            if match := _first(prefills, lambda w, d=decode: w.layout == d.layout):  # type: ignore[misc]
                return Pair(match, decode)
        if self._decode_may_prefill:
            return Pair(None, decodes[0])
        raise NoWorker(Role.PREFILL)


def _fits(worker: WorkerRecord, tokens: int) -> bool:
    return not worker.load.draining and worker.max_model_len >= tokens


def _first(
    workers: Sequence[WorkerRecord], wanted: Callable[[WorkerRecord], bool]
) -> WorkerRecord | None:
    return next(filter(wanted, workers), None)
