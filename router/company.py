"""Who shares its cores with whom, and for how long those have had work.

Where workers are more than cores, a step takes longer while another engine computes on its core:
on two cores with two workers each, that explained two thirds of what a decode step's cost
left open. A worker knows nothing of its neighbours; the router gave them their work. Counts what
one router has given out. Pure: the time comes in.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from baton.cluster.workers import WorkerRecord

MEMORY_S = 2.0


@dataclass
class _Work:
    """`busy_s`: seconds with work, up to `since`; `habit`: the part of the time with work by then,
    what is `MEMORY_S` old counting 1/e."""

    requests: int = 0
    busy_s: float = 0.0
    habit: float = 0.0
    since: float = 0.0

    def change(self, by: int, now: float) -> None:
        self.busy_s, self.habit, self.since = self.until(now), self.usual(now), now
        self.requests += by

    def usual(self, now: float) -> float:
        busy = float(self.requests > 0)
        return busy + (self.habit - busy) * math.exp((self.since - now) / MEMORY_S)

    def until(self, now: float) -> float:
        return self.busy_s + (now - self.since if self.requests else 0.0)


class Company:
    def __init__(self) -> None:
        self._neighbours: dict[str, tuple[tuple[str, float], ...]] = {}
        """By worker: others, and on which part of its cores they run too."""
        self._work: defaultdict[str, _Work] = defaultdict(_Work)

    def saw(self, workers: Iterable[WorkerRecord]) -> None:
        """The workers that live now."""
        on_core: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        placed = [worker for worker in workers if worker.cores]
        for worker in placed:
            for core in worker.cores:
                on_core[_host(worker), core].append(worker.worker_id)
        self._neighbours = {
            worker.worker_id: _shares(worker, [on_core[_host(worker), c] for c in worker.cores])
            for worker in placed
        }
        kept = {k: v for k, v in self._work.items() if k in self._neighbours or v.requests}
        self._work = defaultdict(_Work, kept)

    def now(self, worker_id: str) -> float:
        """Engines that have work on each of its cores besides its own, on average."""
        others = self._neighbours.get(worker_id, ())
        return sum(share for name, share in others if self._work[name].requests)

    def ahead(self, worker_id: str, now: float) -> float:
        """What is to be expected for seconds: half who has work now, half who had it lately. A
        prompt is short and meets those who are there; an answer outlasts them."""
        others = self._neighbours.get(worker_id, ())
        usual = sum(share * self._work[name].usual(now) for name, share in others)
        return (self.now(worker_id) + usual) / 2

    def stay(self, worker_id: str, now: float) -> "Stay":
        """A request has its work there from now on."""
        self._work[worker_id].change(1, now)
        return Stay(self, worker_id, now)

    def seconds(self, worker_id: str, now: float) -> float:
        """What others have had on its cores so far."""
        others = self._neighbours.get(worker_id, ())
        return sum(share * self._work[name].until(now) for name, share in others)

    def left(self, worker_id: str, now: float) -> None:
        self._work[worker_id].change(-1, now)


class Stay:
    """One request on one worker."""

    def __init__(self, company: Company, worker_id: str, now: float) -> None:
        self._company = company
        self._worker_id = worker_id
        self._began_at = now
        self._before_s = company.seconds(worker_id, now)
        self._ended = False

    def so_far(self, now: float) -> float:
        """Engines that had work on each of the worker's cores besides its own, on average."""
        took_s = now - self._began_at
        others_s = self._company.seconds(self._worker_id, now) - self._before_s
        return max(others_s / took_s, 0.0) if took_s > 0.0 else 0.0

    def end(self, now: float) -> float:
        """`so_far`; a stay ends once."""
        found = self.so_far(now)
        if not self._ended:
            self._ended = True
            self._company.left(self._worker_id, now)
        return found


def _host(worker: WorkerRecord) -> str:
    return worker.address.rpartition(":")[0]


def _shares(worker: WorkerRecord, by_core: list[list[str]]) -> tuple[tuple[str, float], ...]:
    counts: defaultdict[str, int] = defaultdict(int)
    for names in by_core:
        for name in names:
            counts[name] += name != worker.worker_id
    return tuple((name, count / len(worker.cores)) for name, count in counts.items() if count)
