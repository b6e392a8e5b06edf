"""One request from its arrival at the router to its last byte, as figures and as phases."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from baton.cluster.ledger.miss import Miss
from baton.cluster.ledger.tiling import Phase, tile
from baton.cluster.ledger.timeline import spans_of
from baton.cluster.ledger.trail import CallTrail, Trail


@dataclass
class Ledger:
    """`started` is on the router's monotonic clock, `started_at` in Unix seconds. A request of
    several prompts has a trail for each; `own` is what it does once, for all of them."""

    request_id: str
    endpoint: str
    started: float
    started_at: float
    answer_id: str = ""
    model: str = ""
    stream: bool = False
    n: int = 1
    tenant: str = ""
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    num_prompt_tokens: int = 0
    status: int = 0
    """HTTP status of the answer, of an error inside a stream too; 499: the client left."""
    traceparent: str | None = None
    """As the client sent it."""
    misses: list[Miss] | None = None
    """Of its targets, with their causes; None until somebody has looked."""
    placement: dict[str, Any] | None = None
    """What was predicted of the placement, and of another one."""
    own: Trail = field(default_factory=Trail)
    trails: list[Trail] = field(default_factory=list)
    ended: float = 0.0

    def trail(self) -> Trail:
        """One more prompt."""
        made = Trail()
        self.trails.append(made)
        return made

    def aims(self, tenant: str, ttft_s: float, tpot_s: float) -> None:
        """Whose it is and what it wants; infinity asks for nothing."""
        self.tenant = tenant
        self.ttft_target_s = None if math.isinf(ttft_s) else ttft_s
        self.tpot_target_s = None if math.isinf(tpot_s) else tpot_s

    def end(self, status: int, now: float) -> None:
        self.status = status
        self.ended = now

    # --- figures ----------------------------------------------------------------------------

    @property
    def num_output_tokens(self) -> int:
        return sum(trail.num_tokens for trail in self.trails)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in a prefix cache by the attempt that gave the first token."""
        return sum(_cached(trail) for trail in self.trails)

    @property
    def known_share(self) -> float:
        """Of the prompt tokens that were computed, those that some other worker held."""
        computed = self.num_prompt_tokens - self.num_cached_tokens
        known = sum(trail.num_known_tokens for trail in self.trails) - self.num_cached_tokens
        return min(max(known / computed, 0.0), 1.0) if computed > 0 else 0.0

    @property
    def num_bytes(self) -> int:
        """What grows with its tokens, in memory."""
        calls = sum(call.num_bytes for call in self.calls)
        return calls + sum(8 * len(trail.deliveries) for trail in self.trails)

    @property
    def calls(self) -> list[CallTrail]:
        return [call for trail in self.trails for call in trail.calls]

    @property
    def begun(self) -> bool:
        """Whether a worker has taken any of it."""
        return self.num_output_tokens > 0 or any(trail.accepted for trail in self.trails)

    def workers(self, role: str) -> list[str]:
        """Without those that refused it."""
        calls = (call for call in self.calls if call.role == role and call.answered)
        return list(dict.fromkeys(call.where for call in calls))

    @property
    def attempts(self) -> int:
        return max((call.attempt for call in self.calls), default=0)

    @property
    def ttft_s(self) -> float | None:
        """Arrival to the first token handed to the client's socket."""
        firsts = [t.first_token_at for t in self.trails if t.first_token_at is not None]
        return min(firsts) - self.started if firsts else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first, of the slowest prompt's longest choice."""
        means = [mean for trail in self.trails if (mean := _tpot(trail)) is not None]
        return max(means, default=None)

    # --- phases -----------------------------------------------------------------------------

    @cached_property
    def phases(self) -> list[Phase]:
        """Of the ended request; the ones that are not overlapped sum to its wall clock."""
        return self.phases_until(self.ended)

    def phases_until(self, now: float) -> list[Phase]:
        return tile(spans_of([self.own, *self.trails]), self.started, now)

    def timing(self, now: float | None = None) -> dict[str, Any]:
        """As clients see it, in milliseconds from the request's arrival. `now` while it runs."""
        phases = self.phases if now is None else self.phases_until(now)
        return {
            "total_ms": _ms((self.ended if now is None else now) - self.started),
            "ttft_ms": _maybe_ms(self.ttft_s),
            "tpot_ms": _maybe_ms(self.tpot_s),
            "phases": [self._shown(phase) for phase in phases],
            "transfer": self._transfer(phases),
            "clocks": [
                {
                    "where": call.where,
                    "offset_ms": _ms(call.clock.offset),
                    "error_ms": _maybe_ms(call.clock.error),
                }
                for call in self.calls
                if call.clock.known
            ],
        }

    def summary(self) -> dict[str, Any]:
        """One row of a list of requests."""
        return {
            "id": self.request_id,
            "answer_id": self.answer_id,
            "endpoint": self.endpoint,
            "model": self.model,
            "tenant": self.tenant,
            "status": self.status,
            "started_at": self.started_at,
            "stream": self.stream,
            "n": self.n,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "prefill": self.workers("prefill"),
            "decode": self.workers("decode"),
            "attempts": self.attempts,
            "ttft_target_ms": _maybe_ms(self.ttft_target_s),
            "tpot_target_ms": _maybe_ms(self.tpot_target_s),
            "total_ms": _ms(self.ended - self.started),
            "ttft_ms": _maybe_ms(self.ttft_s),
            "tpot_ms": _maybe_ms(self.tpot_s),
        }

    def as_json(self) -> dict[str, Any]:
        missed = [miss.as_json() for miss in self.misses or ()]
        return {
            **self.summary(),
            "misses": missed,
            "placement": self.placement,
            "timing": self.timing(),
        }

    def _shown(self, phase: Phase) -> dict[str, Any]:
        return {
            "name": phase.name,
            "where": phase.where,
            "start_ms": _ms(phase.start - self.started),
            "duration_ms": _ms(phase.duration),
            "overlapped": phase.overlapped,
            **phase.detail,
        }

    def _transfer(self, phases: Iterable[Phase]) -> Mapping[str, Any] | None:
        last = [span.detail for call in self.calls for span in call.spans if "bytes" in span.detail]
        moved = [phase for phase in phases if phase.name == "kv_transfer"]
        if not moved and not last:
            return None
        hidden = sum(phase.duration for phase in moved if phase.overlapped)
        total = sum(phase.duration for phase in moved)
        return {
            "total_ms": _ms(total),
            "overlapped_ms": _ms(hidden),
            "exposed_ms": _ms(total - hidden),
            "bytes": sum(detail["bytes"] for detail in last),
            "blocks": sum(detail["blocks"] for detail in last),
            "transports": list(dict.fromkeys(detail["transport"] for detail in last)),
        }


def _tpot(trail: Trail) -> float | None:
    steps = trail.longest - 1
    first, last = trail.first_token_at, trail.last_token_at
    if steps < 1 or first is None or last is None:
        return None
    return (last - first) / steps


def _cached(trail: Trail) -> int:
    first_at = math.inf if trail.first_token_at is None else trail.first_token_at
    calls = [call for call in trail.calls if call.sent_at <= first_at]
    last = max((call.attempt for call in calls), default=0)
    return max((call.num_cached for call in calls if call.attempt == last), default=0)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def _maybe_ms(seconds: float | None) -> float | None:
    return None if seconds is None else _ms(seconds)
