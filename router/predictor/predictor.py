"""Predicts, per worker, the seconds of prefill, of a decode step and of an exposed transfer.

Three linear models: a step that computes prompts costs by (1, prompt tokens, attended tokens,
decoded tokens, their context), a step that only decodes by (1, sequences, context), what a
hand-off adds after the first token by (1, bytes). Workers are seeded by the steps that they
measured at their start and refined by the totals that come back with every request; what
nothing is known of is predicted like its peers, and 0 when there are none; what was known long ago
is doubted (`doubt.py`). Steps are learned as they are where a worker has its cores to itself:
others on them make each one longer (`slowed`). Where drafts are checked a step computes, and
yields, several tokens of a sequence: means of what was seen. Pure: no clock.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from enum import StrEnum

from baton.cluster.workers import Role, WorkerRecord
from baton.step_totals import StepTotals, chunk_attention
from router.predictor.doubt import Doubts
from router.predictor.least_squares import OnlineLeastSquares

OUTPUT_MEMORY = 0.05
COMPANY_COST = 0.8  # a core that two share gives each a half; who has work does not always compute
DRAFT_MEMORY = 0.1
RECENT = 16
Link = tuple[str, str, str]


def slowed(company: float) -> float:
    """How many times as long a step takes with so many other engines on each of its cores; what
    is predicted is to be multiplied by it."""
    return 1.0 + COMPANY_COST * company


class Phase(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    TRANSFER = "transfer"


class _Speed:
    """The two step models of one worker, or of all workers of a role."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.prefill = OnlineLeastSquares(5)
        self.decode = OnlineLeastSquares(3)
        self.profile: tuple[StepTotals, ...] = ()
        self.computed_per_step = self.drawn_per_step = 1.0
        """Tokens of one sequence: more than one where drafts are checked."""

    def seed(self, profile: tuple[StepTotals, ...]) -> None:
        same, self.profile = profile == self.profile, profile
        if same:
            return
        self.prefill.seed([(_prefill_costs(t), t.seconds) for t in profile if t.prefill_tokens])
        self.decode.seed([(_decode_costs(t), t.seconds) for t in profile if not t.prefill_tokens])

    def learn(self, totals: StepTotals, factor: float, judge: bool) -> None:
        if totals.prefill_tokens:
            costs = [factor * cost for cost in _prefill_costs(totals)]
            self.prefill.learn(costs, totals.seconds, judge)
        elif totals.steps:
            costs = [factor * cost for cost in _decode_costs(totals)]
            self.decode.learn(costs, totals.seconds, judge)


class Predictor:
    """Owned by one router; bounded by the workers that `keep_only` names. What a worker took in
    another role says nothing of this one."""

    def __init__(self) -> None:
        self._speeds: dict[str, _Speed] = {}
        self._peers = {role: _Speed(role) for role in Role}
        self._doubts = {role: Doubts() for role in Role}
        self._links: dict[Link, OnlineLeastSquares] = {}
        self._all_links = OnlineLeastSquares(2)
        self._recent = defaultdict[str, deque[tuple[tuple[int, int], float]]](
            lambda: deque(maxlen=RECENT)
        )
        """Hand-offs by transport: what a young link leans on."""
        self._output_tokens = 0.0
        self._admit_s = 0.0

    # --- predictions ------------------------------------------------------------------------

    def prefill_s(
        self,
        worker: WorkerRecord,
        uncached: int,
        cached: int = 0,
        decode_tokens: int = 0,
        context_tokens: int = 0,
    ) -> float:
        """A prompt's own steps; each also decodes `decode_tokens` sequences (mixed batches)."""
        if uncached <= 0:
            return 0.0
        steps = -(-uncached // max(worker.chunk_size - decode_tokens, 1))
        attended = chunk_attention(cached, uncached)
        costs = (steps, uncached, attended, steps * decode_tokens, steps * context_tokens)
        own = self._speed(worker).prefill
        if own.trained and not self._doubts[worker.role].of:
            return own.predict(costs)
        return self._believed_s(worker, own, self._peers[worker.role].prefill, costs)

    def backlog_s(self, worker: WorkerRecord, prompts: int, uncached: int) -> float:
        """So many prompts with so many tokens to compute together, one after the other."""
        if prompts <= 0 or uncached <= 0:
            return 0.0
        return prompts * self.prefill_s(worker, -(-uncached // prompts))

    def token_s(self, worker: WorkerRecord, *loads: tuple[float, float]) -> list[float]:
        """What each sequence waits for its next token under each of these loads: sequences, and
        tokens of their context together. With drafts a step may yield several."""
        speed, peers = self._speed(worker), self._peers[worker.role].decode
        wide, drawn, believed_s = speed.computed_per_step, speed.drawn_per_step, self._believed_s
        return [
            believed_s(worker, speed.decode, peers, (1, wide * sequences, wide * context)) / drawn
            for sequences, context in loads
        ]

    def _believed_s(
        self,
        worker: WorkerRecord,
        own: OnlineLeastSquares,
        peers: OnlineLeastSquares,
        costs: tuple[float, ...],
    ) -> float:
        """Its own model's word where it has one; when that is old, less of what it is slower."""
        if not own.trained:
            return peers.predict(costs)
        own_s = own.predict(costs)
        doubt = self._doubts[worker.role].of.get(worker.worker_id, 0.0)
        if not doubt or not peers.trained:
            return own_s
        return own_s - doubt * max(own_s - peers.predict(costs), 0.0)

    def tokens_per_step(self, worker: WorkerRecord) -> float:
        """That a sequence gets: more than one where drafts turn out right."""
        return self._speed(worker).drawn_per_step

    def transfer_s(self, prefill: WorkerRecord, decode: WorkerRecord, num_bytes: float) -> float:
        """From the first token to the committed hand-off, `num_bytes` being left to send."""
        if num_bytes <= 0:
            return 0.0
        link = prefill.link_to.get(decode.address)
        transport = link.transport if link else ""
        model = self._links.get((prefill.worker_id, decode.worker_id, transport), self._all_links)
        return (model if model.trained else self._all_links).predict((1, num_bytes))

    @property
    def admit_s(self) -> float:
        """What the first token takes beside its prefill worker: reserving, the way to and fro."""
        return self._admit_s

    def output_tokens(self, max_tokens: int) -> float:
        """How long an answer is likely to become."""
        return min(max_tokens, self._output_tokens or max_tokens)

    def knows(self, worker: WorkerRecord) -> bool:
        """Whether predictions for this worker rest on anything."""
        speed, peers = self._speed(worker), self._peers[worker.role]
        return any(s.prefill.trained or s.decode.trained for s in (speed, peers))

    # --- observations -----------------------------------------------------------------------

    def sent(self, worker: WorkerRecord) -> None:
        """A request goes there."""
        self._doubts[worker.role].tried(worker.worker_id)

    def saw_steps(self, worker: WorkerRecord, totals: StepTotals, company: float = 0.0) -> None:
        """`company`: other engines that had work on each of its cores meanwhile, on average."""
        self._doubts[worker.role].heard(worker.worker_id)
        self._speed(worker).learn(totals, slowed(company), judge=True)
        self._peers[worker.role].learn(totals, slowed(company), judge=False)

    def saw_drafts(self, worker: WorkerRecord, steps: int, computed: int, drawn: int) -> None:
        """What decode steps of one sequence computed and drew, in tokens."""
        if steps > 0:
            speed = self._speed(worker)
            speed.computed_per_step += DRAFT_MEMORY * (computed / steps - speed.computed_per_step)
            speed.drawn_per_step += DRAFT_MEMORY * (drawn / steps - speed.drawn_per_step)

    def saw_transfer(
        self, prefill: WorkerRecord, decode: WorkerRecord, transport: str, sent: int, seconds: float
    ) -> None:
        """The first one of a link teaches nothing: it opens connections, which no other pays."""
        if sent <= 0:
            return
        key = (prefill.worker_id, decode.worker_id, transport)
        if key not in self._links:
            self._links[key] = OnlineLeastSquares(2)
            return
        link, recent = self._links[key], self._recent[transport]
        if len(link.errors) < RECENT:
            link.seed(recent)
        link.learn((1, sent), seconds)
        self._all_links.learn((1, sent), seconds, judge=False)
        recent.append(((1, sent), seconds))

    def saw_output(self, tokens: int) -> None:
        known = self._output_tokens or tokens
        self._output_tokens = known + OUTPUT_MEMORY * (tokens - known)

    def saw_admission(self, seconds: float) -> None:
        self._admit_s += OUTPUT_MEMORY * (min(max(seconds, 0.0), 1.0) - self._admit_s)

    def keep_only(self, workers: Iterable[WorkerRecord]) -> None:
        """Forgets workers that are gone or have another role; their links with them."""
        roles = {worker.worker_id: worker.role for worker in workers}
        self._speeds = {k: v for k, v in self._speeds.items() if roles.get(k) is v.role}
        for role, doubts in self._doubts.items():
            doubts.keep_only({name for name, its in roles.items() if its is role})
        ends = (Role.PREFILL, Role.DECODE)
        self._links = {
            link: model
            for link, model in self._links.items()
            if (roles.get(link[0]), roles.get(link[1])) == ends
        }

    def mape(self, phase: Phase) -> float | None:
        """Mean relative error of the last predictions of all workers; None before the first."""
        models = {
            Phase.PREFILL: [speed.prefill for speed in self._speeds.values()],
            Phase.DECODE: [speed.decode for speed in self._speeds.values()],
            Phase.TRANSFER: list(self._links.values()),
        }[phase]
        errors = [error for model in models for error in model.errors]
        return sum(errors) / len(errors) if errors else None

    def _speed(self, worker: WorkerRecord) -> _Speed:
        speed = self._speeds.get(worker.worker_id)
        if speed is None or speed.role is not worker.role:
            speed = self._speeds[worker.worker_id] = _Speed(worker.role)
            self._doubts[worker.role].tried(worker.worker_id)
        if speed.profile is not worker.profile:
            speed.seed(worker.profile)
        return speed


def _prefill_costs(t: StepTotals) -> tuple[float, ...]:
    return t.steps, t.prefill_tokens, t.attended_tokens, t.decode_tokens, t.context_tokens


def _decode_costs(t: StepTotals) -> tuple[float, ...]:
    return t.steps, t.decode_tokens, t.context_tokens
