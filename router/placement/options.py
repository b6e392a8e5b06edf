"""Which workers may serve a request, together or alone, and what each way costs.

Leaves out workers that drain, are too small or full, and pairs whose KV caches differ. Pure:
candidates, predictions and the request come in, plans go out.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.cluster.errors import Overloaded, WorkerUnavailable
from baton.cluster.settings import DecodePrefills
from baton.cluster.workers import KVLayout, Role
from router.placement.cost import Cost, Plan, others_miss, over, own_miss
from router.placement.facts import Candidate, RequestFacts
from router.placement.pricing import Pricing
from router.predictor import Predictor


class NoWorker(WorkerUnavailable):
    """No live worker of a role can take the request."""

    def __init__(self, role: Role) -> None:
        super().__init__(f"No {role} worker is available.", retry_after_s=1.0)
        self.role = role


class NoRoom(Overloaded):
    """The workers that can take the request are full now."""

    def __init__(self, role: Role) -> None:
        super().__init__(f"Every {role} worker is full.", retry_after_s=1.0)


@dataclass(frozen=True)
class Rules:
    """`backlog_s`: predicted prefill work that a worker may have ahead of a new prompt. What does
    not fit waits in the router, where its turn and its worker can still be changed. `promised`:
    decode keeps room for the request already, even when it drains or is full."""

    decode_prefills: DecodePrefills = "auto"
    backlog_s: float = 0.25
    promised: bool = False


class Options:
    """The ways to serve one request. Raises NoWorker or NoRoom when there are none."""

    def __init__(
        self,
        request: RequestFacts,
        candidates: Iterable[Candidate],
        predictor: Predictor,
        rules: Rules,
    ) -> None:
        self.request = request
        self._rules = rules
        self._pricing = Pricing(request, predictor)
        fit = [candidate for candidate in candidates if self._fits(candidate)]
        prefills = [c for c in fit if c.record.role is Role.PREFILL]
        decodes = [c for c in fit if c.record.role is Role.DECODE]
        ready = [c for c in prefills if self._prefill_has_room(c)]
        # When all are busy, they stay in the comparison: waiting may be the best there is.
        self.prefills = ready or prefills
        self._must_wait = not ready
        self._by_layout: dict[KVLayout, list[Candidate]] = {}
        for prefill in self.prefills:
            self._by_layout.setdefault(prefill.record.layout, []).append(prefill)
        self._matching: dict[KVLayout, list[Candidate]] = {}
        """By layout of the decode worker; workers of one layout are many."""
        self._pairs: dict[tuple[KVLayout, KVLayout], bool] = {}
        self._busy = {c.record.worker_id for c in decodes if not self._may_queue(c)}
        self.decodes = [c for c in decodes if self._decode_has_room(c) and self._usable(c)]
        if not self.decodes and (request.needs_decode or not self.prefills):
            raise self._nothing(decodes)

    def match(self, prefill: Candidate, decode: Candidate) -> bool:
        """Whether the one can hand over to the other."""
        return self._hands_over(prefill.record.layout, decode.record.layout)

    def matching(self, decode: Candidate) -> Sequence[Candidate]:
        """Prefill workers that can hand over to `decode`."""
        theirs = decode.record.layout
        if theirs not in self._matching:
            self._matching[theirs] = [
                prefill
                for layout, prefills in self._by_layout.items()
                if self._hands_over(layout, theirs)
                for prefill in prefills
            ]
        return self._matching[theirs]

    def may_prefill(self, decode: Candidate) -> bool:
        """Whether `decode` may compute the prompt itself."""
        rule = self._rules.decode_prefills
        if decode.record.worker_id in self._busy:
            return False
        return rule == "auto" or (rule == "fallback" and not self.matching(decode))

    def check(self, plan: Plan) -> Plan:
        """The plan, unless it has to wait for a busy prefill worker. Raises NoRoom then."""
        if plan.prefill is not None and self._must_wait:
            raise NoRoom(Role.PREFILL)
        return plan

    # --- ways and their costs ---------------------------------------------------------------

    def pair(self, prefill: Candidate, decode: Candidate) -> Plan:
        return self._plan(prefill, decode, self._pricing.pair(prefill, decode))

    def prefill_only(self, prefill: Candidate) -> Plan:
        """For a request of one token."""
        cost = self._pricing.prefill_only(prefill)
        return Plan(prefill.record, None, cost, over(cost.ttft_s, self.request.targets.ttft_s))

    def decode_alone(self, decode: Candidate) -> Plan:
        return self._plan(None, decode, self._pricing.decode_alone(decode))

    def plan(self, prefill: Candidate | None, decode: Candidate | None) -> Plan:
        """The way that uses just these two."""
        if decode is None and prefill is not None:
            return self.prefill_only(prefill)
        assert decode is not None
        return self.pair(prefill, decode) if prefill else self.decode_alone(decode)

    def prefill_rank(self, prefill: Candidate) -> tuple[float, float, int, str]:
        """How good a prefill worker is by itself: lateness, then seconds; less is better."""
        queue_s, prefill_s = self._pricing.queue_s(prefill), self._pricing.prefill_s(prefill)
        late = over(self.request.waited_s + queue_s + prefill_s, self.request.targets.ttft_s)
        return late, queue_s + 2 * prefill_s, prefill.requests, prefill.record.worker_id

    def decode_rank(self, decode: Candidate) -> tuple[float, float, int, int, str]:
        """How good a decode worker is by itself."""
        before, after = self._pricing.steps_s(decode)
        late = over(after, self.request.targets.tpot_s)
        late += over(after, max(decode.tightest_tpot_s, before)) if before else 0.0
        harm_s = after + self._pricing.decode_harm_s(decode) + self._pricing.decode_queue_s(decode)
        return late, harm_s, -decode.cached_tokens, decode.requests, decode.record.worker_id

    def _plan(self, prefill: Candidate | None, decode: Candidate, cost: Cost) -> Plan:
        targets = self.request.targets
        promised = self._rules.promised
        others = 0.0 if promised else others_miss(cost, targets, decode.tightest_tpot_s)
        own = own_miss(cost, targets, self.request.needs_decode)
        return Plan(prefill and prefill.record, decode.record, cost, own + others, others)

    # --- who may serve ----------------------------------------------------------------------

    def _hands_over(self, prefill: KVLayout, decode: KVLayout) -> bool:
        pair = prefill, decode
        if pair not in self._pairs:
            self._pairs[pair] = self._may_hand_over(prefill, decode)
        return self._pairs[pair]

    def _may_hand_over(self, prefill: KVLayout, decode: KVLayout) -> bool:
        """Under a policy that drops tokens blocks have one size; with state, one dtype."""
        policy = self.request.kv_policy
        same_size = policy.is_full or prefill.block_size == decode.block_size
        same_dtype = not policy.keeps_state or prefill.dtype == decode.dtype
        return same_size and same_dtype and prefill.hands_over_to(decode)

    def _nothing(self, decodes: list[Candidate]) -> NoWorker | NoRoom:
        if not decodes:
            return NoWorker(Role.DECODE if self.request.needs_decode else Role.PREFILL)
        if not self._busy and not any(map(self._usable, decodes)):
            return NoWorker(Role.PREFILL)
        return NoRoom(Role.DECODE)

    def _usable(self, decode: Candidate) -> bool:
        return bool(self.matching(decode)) or self.may_prefill(decode)

    def _fits(self, candidate: Candidate) -> bool:
        record, request = candidate.record, self.request
        prompt = tokens = request.num_prompt_tokens
        if record.role is Role.DECODE:
            if self._rules.promised:
                return True
            if request.n > record.max_num_seqs:
                return False
            tokens += request.max_tokens
        return not record.load.draining and record.can_hold(request.kv_policy, prompt, tokens)

    def _prefill_has_room(self, candidate: Candidate) -> bool:
        if candidate.requests == 0 or math.isinf(self._rules.backlog_s):
            return True
        queue_s = self._pricing.queue_s(candidate)
        backlog_s = self._rules.backlog_s * candidate.share
        return queue_s <= backlog_s or self._worth_waiting(candidate, queue_s, backlog_s)

    def _may_queue(self, decode: Candidate) -> bool:
        """Whether a prompt may join those that a decode worker has to compute."""
        if decode.prefilling[0] == 0 or math.isinf(self._rules.backlog_s):
            return True
        queue_s = self._pricing.decode_queue_s(decode)
        backlog_s = self._rules.backlog_s
        return queue_s <= backlog_s or self._worth_waiting(decode, queue_s, backlog_s)

    def _worth_waiting(self, candidate: Candidate, queue_s: float, backlog_s: float) -> bool:
        """A prompt may wait longer where its beginning is cached, or being computed for another
        request: by the time that it takes to compute that elsewhere."""
        return queue_s <= backlog_s + self._pricing.saved_s(candidate)

    def _decode_has_room(self, candidate: Candidate) -> bool:
        record, n = candidate.record, self.request.n
        if self._rules.promised:
            return True
        if candidate.requests and candidate.requests + n > record.max_num_seqs * candidate.share:
            return False
        # As decode promises them: blocks for the prompt, and one more per choice.
        size = record.layout.block_size
        wanted = -(-self._pricing.kept(size) // size) + n
        held = candidate.cached_tokens // size
        return candidate.free_blocks >= min(wanted, record.num_blocks) - held
