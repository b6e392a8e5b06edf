"""What a placement is predicted to cost, item by item. Pure arithmetic on predictions.

The first token leaves prefill before its KV cache has landed, so an exposed transfer, and prompts
that decode has still to compute by then, delay the second token, not the first: they are in
`tpot_s`. Costs do not depend on targets, and a miss only shrinks as targets grow, so that more
slack never makes a choice worse.
"""

from typing import NamedTuple

from baton.cluster.workers import WorkerRecord
from router.targets import Targets

# A prediction this far below a target counts as meeting it.
HEADROOM = 0.9


class Cost(NamedTuple):
    """Seconds, but for the counts. `stall_s`: for prompts that the decode worker still computes
    when it gets the request. `others_*`: the time per token of those already on the decode worker,
    after and before; `harm_s`: what they lose together."""

    waited_s: float = 0.0
    admit_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    stall_s: float = 0.0
    step_s: float = 0.0
    output_tokens: float = 1.0
    others: int = 0
    others_before_s: float = 0.0
    others_after_s: float = 0.0
    harm_s: float = 0.0
    cached_tokens: int = 0
    uncached_tokens: int = 0
    transfer_bytes: int = 0
    free_blocks: int = 0
    ahead: int = 0
    """Prompts and choices that the workers have already."""

    @property
    def ttft_s(self) -> float:
        return self.waited_s + self.admit_s + self.queue_s + self.prefill_s

    @property
    def tpot_s(self) -> float:
        return self.step_s + (self.transfer_s + self.stall_s) / max(self.output_tokens - 1, 1)

    @property
    def total_s(self) -> float:
        """Seconds that the request takes, and takes from others: its prefill keeps the next one
        waiting as long as itself."""
        own = self.ttft_s + self.tpot_s * max(self.output_tokens - 1, 1)
        return own + self.prefill_s + self.harm_s


class Plan(NamedTuple):
    """A placement. `prefill=None`: decode prefills itself. `decode=None`: prefill is enough.
    `miss`: by which part promises are predicted to be missed, 0 when all are kept; what of it
    is other requests' is `others_miss`."""

    prefill: WorkerRecord | None
    decode: WorkerRecord | None
    cost: Cost
    miss: float = 0.0
    others_miss: float = 0.0
    other: "Plan | None" = None
    """The next best, where the policy compared."""

    @property
    def rank(self) -> tuple[float, float, bool, int, str, str]:
        """The least one is the best. Where nothing is known, prefill and decode stay apart."""
        prefill_id = self.prefill.worker_id if self.prefill else ""
        decode_id = self.decode.worker_id if self.decode else ""
        cost = self.cost
        return self.miss, cost.total_s, not prefill_id, cost.ahead, prefill_id, decode_id


def own_miss(cost: Cost, targets: Targets, needs_decode: bool) -> float:
    """0, or how far the newcomer's targets are missed."""
    late = over(cost.ttft_s, targets.ttft_s)
    return late + over(cost.tpot_s, targets.tpot_s) if needs_decode else late


def others_miss(cost: Cost, targets: Targets, tightest_tpot_s: float) -> float:
    """0, or how far promises to others are missed that were kept so far. They weigh half as much
    with each step of the newcomer's priority."""
    kept_s = max(tightest_tpot_s, cost.others_before_s)
    rank = max(-10, min(targets.priority, 10))
    return over(cost.others_after_s, kept_s) * 2.0**-rank


def over(predicted_s: float, target_s: float) -> float:
    """By which part a prediction is beyond what counts as meeting a target."""
    late = predicted_s / (HEADROOM * target_s) - 1.0
    return late if late > 0.0 else 0.0
