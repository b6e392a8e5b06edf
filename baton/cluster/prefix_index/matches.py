"""What a look-up found: leading blocks of one prompt, by worker and life.

Plain data. A worker counts only under the incarnation that published the blocks, so a restarted
worker's old entries never match its new record.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.cluster.prefix_index.prompt_blocks import PromptBlocks
from baton.cluster.rendezvous import rendezvous
from baton.cluster.workers import Role, WorkerRecord

WorkerKey = tuple[str, str]
"""Worker id and incarnation."""


def key_of(worker: WorkerRecord) -> WorkerKey:
    return worker.worker_id, worker.incarnation


@dataclass(frozen=True)
class PrefixMatches:
    """Counts of leading blocks. `held`: in the worker's cache. `coming`: of requests routed there
    a moment ago, present or on their way. `available=False`: the index could not be asked, and
    `coming` is a guess."""

    held: Mapping[WorkerKey, int] = field(default_factory=dict)
    coming: Mapping[WorkerKey, int] = field(default_factory=dict)
    available: bool = True

    @classmethod
    def guessed(cls, prompt: PromptBlocks, workers: Sequence[WorkerRecord]) -> "PrefixMatches":
        """Without an index: prompts that begin alike go to the same worker of each role, so that
        one may have seen this beginning before."""
        coming = {}
        for role in Role:
            known = {worker.worker_id: worker for worker in workers if worker.role is role}
            for worker_id in rendezvous(prompt.affinity, known)[:1]:
                worker = known[worker_id]
                coming[key_of(worker)] = len(prompt.reusable_hashes(worker.layout))
        return cls(coming=coming, available=False)

    def held_tokens(self, worker: WorkerRecord) -> int:
        return self.held.get(key_of(worker), 0) * worker.layout.block_size

    def expected_tokens(self, worker: WorkerRecord) -> int:
        """Tokens in the worker's cache by the time this request gets there."""
        key = key_of(worker)
        return max(self.held.get(key, 0), self.coming.get(key, 0)) * worker.layout.block_size
