"""What a look-up found: leading blocks of one prompt, by worker and life.

Plain data. A worker counts only under the incarnation that published the blocks, so a restarted
worker's old entries never match its new record.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.cluster.workers import WorkerRecord

WorkerKey = tuple[str, str]
"""Worker id and incarnation."""


def key_of(worker: WorkerRecord) -> WorkerKey:
    return worker.worker_id, worker.incarnation


@dataclass(frozen=True)
class PrefixMatches:
    """Counts of leading blocks. `held`: in the worker's cache. `coming`: of requests routed there
    a moment ago, present or on their way. `available=False`: the index could not be asked."""

    held: Mapping[WorkerKey, int] = field(default_factory=dict)
    coming: Mapping[WorkerKey, int] = field(default_factory=dict)
    available: bool = True

    @classmethod
    def none(cls) -> "PrefixMatches":
        """Nothing is known: place by rendezvous affinity."""
        return cls(available=False)

    def held_tokens(self, worker: WorkerRecord) -> int:
        return self.held.get(key_of(worker), 0) * worker.layout.block_size

    def expected_tokens(self, worker: WorkerRecord) -> int:
        """Tokens in the worker's cache by the time this request gets there."""
        key = key_of(worker)
        return max(self.held.get(key, 0), self.coming.get(key, 0)) * worker.layout.block_size
