"""What placement is told: the request, and each worker as it stands now. Plain data.

Loads are those of all routers where they are known. A worker's own report lags by a heartbeat.
"""

import math
from typing import NamedTuple

from baton.cluster.workers import WorkerRecord
from baton.kv_policy import FULL, KVPolicy
from router.targets import Targets

NO_TARGETS = Targets()


class RequestFacts(NamedTuple):
    """`number` counts this router's requests; `waited_s` have passed since it came."""

    num_prompt_tokens: int
    max_tokens: int
    n: int
    targets: Targets = NO_TARGETS
    waited_s: float = 0.0
    number: int = 0
    kv_policy: KVPolicy = FULL

    def kept_tokens(self, block_size: int) -> int:
        """Of the prompt, in the cache that decode goes on with."""
        return self.kv_policy.kept(self.num_prompt_tokens, self.num_prompt_tokens, block_size)

    @property
    def needs_decode(self) -> bool:
        """A single token is drawn by prefill."""
        return self.max_tokens > 1


class Candidate(NamedTuple):
    """A worker and what is promised to it. On prefill `requests` are prompts and `tokens` those
    of them still to compute; on decode they are choices and the tokens of their context."""

    record: WorkerRecord
    requests: int = 0
    tokens: int = 0
    free_blocks: int = 0
    """On decode."""
    cached_tokens: int = 0
    """Of this request's prompt, in its cache by the time the request gets there. While nothing is
    known of caches: where prompts that begin like this one are sent."""
    prefilling: tuple[int, int] = (0, 0)
    """Prompts that a decode worker computes itself, and their tokens still to compute."""
    tightest_tpot_s: float = math.inf
    """The shortest target among the requests that it decodes."""
    share: float = 1.0
    """Of its capacity: a newcomer gets less."""
    company: float = 0.0
    """Other engines that have work on each of its cores: now, and on decode in the seconds to
    come."""

    @property
    def crowding(self) -> tuple[float, str]:
        """Orders by load relative to size."""
        load = self.record.load
        reported = load.waiting + load.running + load.handoffs_in_flight
        share = max(reported, self.requests) / max(self.record.max_num_seqs, 1)
        return share, self.record.worker_id
