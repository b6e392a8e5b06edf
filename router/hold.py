"""One attempt's promises to its workers, and what their events teach.

Listens to both calls of an attempt: a prompt that is computed frees its prefill worker, and the
totals at the end refine the predictions. Changes no event.
"""

import time
from collections.abc import Callable
from typing import Any

from baton.cluster.load_ledger import Load, LoadLedger
from baton.cluster.workers import WorkerRecord
from baton.step_totals import StepTotals
from baton.v1 import common_pb2, decode_pb2
from router.company import Company, Stay
from router.placement import Plan, RequestFacts
from router.predictor import Predictor


class Hold:
    """`on_room` is called when a prefill worker can take another prompt."""

    def __init__(
        self,
        plan: Plan,
        facts: RequestFacts,
        loads: LoadLedger,
        predictor: Predictor,
        company: Company,
        on_room: Callable[[], None],
    ) -> None:
        self.plan = plan
        self.ttft_s: float | None = None
        """Measured, from the request's arrival; None until its first token."""
        self._facts = facts
        self._loads = loads
        self._predictor = predictor
        self._company = company
        self._on_room = on_room
        self._began_at = time.monotonic()
        self._waited_s = plan.cost.waited_s
        self._moved = False
        self._stay = self._stay_on(plan.prefill or plan.decode)
        self._prefill_company = 0.0
        self._queue_s = 0.0
        self._steps = self._computed = self._drawn = 0
        self._prefill, self._decode = _claims(plan, facts)
        loads.add(self._prefill)
        loads.add(self._decode)

    def heard(self, kind: str | None, event: Any) -> None:
        """`event` is a PrefillEvent or a GenerateEvent."""
        if kind == "tokens":
            if self._prefill and event.tokens.tokens:  # else a chunk of the prompt is computed
                self._prefilled()
            self._count(event.tokens.step)
        elif kind == "started":
            self._queue_s = event.started.queue_s
        elif kind == "first_tokens":
            self._prefilled()
        elif kind == "done":
            self._learn(event.done)

    async def confirmed(self) -> bool:
        """Call it at once. False when another router was quicker to load these workers."""
        return await self._loads.confirm([*self._prefill, *self._decode])

    def move(self, plan: Plan) -> None:
        """Another prefill worker takes over for the same decode worker."""
        self._loads.remove(self._prefill)
        self._stay.end(time.monotonic())
        self.plan, self._moved = plan, True
        self._stay = self._stay_on(plan.prefill)
        self._prefill, _ = _claims(plan, self._facts)
        self._loads.add(self._prefill)

    def release(self) -> None:
        self._loads.remove(self._prefill)
        self._loads.remove(self._decode)
        self._prefill, self._decode = {}, {}
        self._stay.end(time.monotonic())

    def _stay_on(self, worker: WorkerRecord | None) -> Stay:
        assert worker is not None
        return self._company.stay(worker.worker_id, time.monotonic())

    def _prefilled(self) -> None:
        self._loads.remove(self._prefill)
        if self._prefill:
            self._prefill_company = self._stay.end(time.monotonic())
            if self.plan.decode is not None:
                self._stay = self._stay_on(self.plan.decode)
        self._prefill = {}
        elapsed_s = time.monotonic() - self._began_at
        self.ttft_s = self.ttft_s or self._waited_s + elapsed_s
        self._on_room()

    def _count(self, step: common_pb2.Step) -> None:
        computed, drawn = 1 + step.num_drafted_tokens, step.num_tokens
        if 0 < drawn <= computed:  # else a chunk of a prompt, or a worker that does not tell
            self._steps += 1
            self._computed += computed
            self._drawn += drawn

    def _learn(self, done: Any) -> None:
        prefill, decode = self.plan.prefill, self.plan.decode
        if isinstance(done, decode_pb2.GenerateDone):
            if decode is not None:
                company = self._stay.so_far(time.monotonic())
                prefilled, decoded = map(totals_from_pb, (done.prefill_steps, done.decode_steps))
                # After a hand-off the prompts computed beside it are those of others, all along.
                beside = self._prefill_company if prefill is None else company
                self._predictor.saw_steps(decode, prefilled, beside)
                self._predictor.saw_steps(decode, decoded, company)
                self._predictor.saw_drafts(decode, self._steps, self._computed, self._drawn)
            return
        if prefill is None:
            return
        self._predictor.saw_steps(prefill, totals_from_pb(done.totals), self._prefill_company)
        if self.ttft_s is not None and not self._moved:
            on_worker_s = self._queue_s + done.compute_s
            self._predictor.saw_admission(self.ttft_s - self._waited_s - on_worker_s)
        if decode is not None:
            self._predictor.saw_transfer(
                prefill, decode, done.transport, done.exposed_bytes, done.transfer_s
            )


def _claims(plan: Plan, facts: RequestFacts) -> tuple[dict[str, Load], dict[str, Load]]:
    """What a plan asks of its workers until the prompt is computed, and until the end."""
    prompt = Load(1, plan.cost.uncached_tokens)
    if plan.decode is None:
        return ({plan.prefill.worker_id: prompt} if plan.prefill else {}), {}
    context = round(facts.n * (facts.num_prompt_tokens + plan.cost.output_tokens / 2))
    decode = {plan.decode.worker_id: Load(facts.n, context)}
    if plan.prefill is None:
        return {f"{plan.decode.worker_id}/prefill": prompt}, decode
    return {plan.prefill.worker_id: prompt}, decode


def totals_from_pb(message: common_pb2.StepTotals) -> StepTotals:
    return StepTotals(
        message.steps,
        message.prefill_tokens,
        message.attended_tokens,
        message.decode_tokens,
        message.context_tokens,
        message.seconds,
    )
