"""What is counted of the requests of one model, tenant and pair of workers."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from baton.cluster.ledger import Ledger
from baton.cluster.ledger.miss import Miss
from baton.cluster.reports.sketch import Sketch

OK = 200
LEFT = 499


class Key(NamedTuple):
    model: str
    tenant: str
    prefill: str
    decode: str


def key_of(ledger: Ledger) -> Key:
    """By the workers of its last attempt."""
    last = {call.role: call.where for trail in ledger.trails for call in trail.calls}
    return Key(ledger.model, ledger.tenant, last.get("prefill", ""), last.get("decode", ""))


@dataclass
class Group:
    """Sketches of seconds (and of bytes per second, `transfer_rate`); counters by name."""

    sketches: dict[str, Sketch] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def observe(self, name: str, value: float) -> None:
        sketch = self.sketches.get(name)
        if sketch is None:
            sketch = self.sketches[name] = Sketch()
        sketch.add(value)

    def add(self, ledger: Ledger) -> None:
        """The figures of one request, cheaply; its phases are `add_phases`' part."""
        counters = self.counters
        counters["requests"] += 1
        if ledger.status == LEFT:
            counters["left"] += 1
        elif ledger.status != OK:
            counters["failed"] += 1
        if ledger.begun:  # of the others nobody looked for a cached prefix
            counters["prompt_tokens"] += ledger.num_prompt_tokens
        counters["cached_tokens"] += ledger.num_cached_tokens
        counters["output_tokens"] += ledger.num_output_tokens
        counters["retried"] += ledger.attempts > 1
        if ledger.placement is not None:
            chosen = ledger.placement["chosen"]
            counters["predicted"] += 1
            counters["predicted_ttft_ms"] += chosen["ttft_ms"] or 0.0
            counters["predicted_tpot_ms"] += chosen["tpot_ms"] or 0.0
        self._latencies(ledger)

    def _latencies(self, ledger: Ledger) -> None:
        good = ledger.status == OK
        for name, seen, target in (
            ("ttft", ledger.ttft_s, ledger.ttft_target_s),
            ("tpot", ledger.tpot_s, ledger.tpot_target_s),
        ):
            if seen is not None:
                self.observe(name, seen)
                if target is not None:
                    self.counters[f"{name}_{'kept' if seen <= target else 'missed'}"] += 1
                    good = good and seen <= target
        if ledger.status == OK:
            self.observe("e2e", ledger.ended - ledger.started)
        self.counters["good"] += good

    def add_phases(self, ledger: Ledger, missed: Iterable[Miss]) -> None:
        """Seconds of each phase that counted, steps by batch size, transfer, causes of misses."""
        self.counters["with_phases"] += 1
        first_at = ledger.started + (ledger.ttft_s or 0.0)
        sums: dict[str, float] = defaultdict(float)
        for phase in ledger.phases:
            if not phase.overlapped:
                sums[f"phase.{phase.name}"] += phase.duration
                if phase.end <= first_at + 1e-9:
                    sums[f"until_first.{phase.name}"] += phase.duration
            elif phase.name == "kv_transfer":
                sums["phase.kv_transfer_hidden"] += phase.duration
        for name, seconds in sums.items():
            self.observe(name, seconds)
        self._steps(ledger)
        self._transfers(ledger)
        for miss in missed:
            self.counters[f"miss.{miss.target}.{miss.cause}"] += 1

    def _steps(self, ledger: Ledger) -> None:
        by_batch: dict[int, list[float]] = defaultdict(list)
        for call in ledger.calls:
            if call.role != "decode":
                continue
            for start, end, batch_size, num_tokens, _, drafted in call.steps_by_row():
                if num_tokens == 1 and not drafted:
                    # Batches by powers of two: 1, 2, 3-4, 5-8, …
                    by_batch[1 << (int(batch_size) - 1).bit_length()].append(end - start)
        for batch_size, seconds in by_batch.items():
            # One value per request and size: a long answer does not outweigh the others.
            self.observe(f"step.{batch_size}", sum(seconds) / len(seconds))

    def _transfers(self, ledger: Ledger) -> None:
        for call in ledger.calls:
            spans = [noted for noted in call.spans if noted.name == "kv_transfer"]
            sent = sum(noted.detail.get("bytes", 0) for noted in spans)
            took = sum(noted.end - noted.start for noted in spans)
            if sent and took > 0:
                self.counters["transfer_bytes"] += sent
                self.observe("transfer_rate", sent / took)

    def merge(self, other: "Group") -> None:
        for name, sketch in other.sketches.items():
            self.sketches.setdefault(name, Sketch()).merge(sketch)
        for name, value in other.counters.items():
            self.counters[name] += value

    def as_json(self) -> dict[str, Any]:
        return {
            "sketches": {name: sketch.as_json() for name, sketch in self.sketches.items()},
            "counters": dict(self.counters),
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Self:
        made = cls({name: Sketch.from_json(each) for name, each in raw["sketches"].items()})
        made.counters.update(raw["counters"])
        return made
