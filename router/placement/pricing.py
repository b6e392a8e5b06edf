"""Prices placements of one request from predictions; what depends on one worker is priced once."""

import math

from baton.cluster.workers import WorkerRecord
from router.placement.cost import Cost
from router.placement.facts import Candidate, RequestFacts
from router.predictor import Predictor, slowed

BYTES_PER_VALUE = {"bfloat16": 2, "float32": 4, "fp8": 1, "int8": 1, "int4": 0.5}


class Pricing:
    def __init__(self, request: RequestFacts, predictor: Predictor) -> None:
        self._request = request
        self._predictor = predictor
        self._output = predictor.output_tokens(request.max_tokens)
        self._queues: dict[str, float] = {}
        self._prefills: dict[str, float] = {}
        self._steps: dict[str, tuple[float, float]] = {}
        self._kept: dict[int, int] = {}

    def queue_s(self, prefill: Candidate) -> float:
        """Until a prefill worker has computed what it has."""
        if not prefill.requests:
            return 0.0
        record = prefill.record
        queue_s = self._queues.get(record.worker_id)
        if queue_s is None:
            queue_s = self._predictor.backlog_s(record, prefill.requests, prefill.tokens)
            queue_s *= slowed(prefill.company)
            self._queues[record.worker_id] = queue_s
        return queue_s

    def decode_queue_s(self, decode: Candidate) -> float:
        """Until a decode worker has computed the prompts that it was given."""
        if not decode.prefilling[0]:
            return 0.0
        queue_s = self._predictor.backlog_s(decode.record, *decode.prefilling)
        return queue_s * slowed(decode.company)

    def prefill_s(self, prefill: Candidate) -> float:
        """The prompt's own time on a prefill worker, after what that has cached."""
        record = prefill.record
        prefill_s = self._prefills.get(record.worker_id)
        if prefill_s is None:
            uncached = self.uncached(prefill)
            cached = self._request.num_prompt_tokens - uncached
            prefill_s = self._predictor.prefill_s(record, uncached, cached)
            prefill_s *= slowed(prefill.company)
            self._prefills[record.worker_id] = prefill_s
        return prefill_s

    def saved_s(self, candidate: Candidate) -> float:
        """What the worker's cache spares it of the prompt."""
        predict_s, prompt = self._predictor.prefill_s, self._request.num_prompt_tokens
        left = self.uncached(candidate)
        whole_s = predict_s(candidate.record, prompt)
        left_s = predict_s(candidate.record, left, prompt - left)
        return (whole_s - left_s) * slowed(candidate.company)

    def steps_s(self, decode: Candidate) -> tuple[float, float]:
        """Time per token of each sequence there without this request (0 when idle) and with it."""
        record = decode.record
        steps_s = self._steps.get(record.worker_id)
        if steps_s is None:
            n, now = self._request.n, (decode.requests, decode.tokens)
            context = n * (self.kept(record.layout.block_size) + self._output / 2)
            then = (decode.requests + n, decode.tokens + context)
            before, after = self._predictor.token_s(record, now, then)
            factor = slowed(decode.company)
            steps_s = factor * (before if decode.requests else 0.0), factor * max(after, before)
            self._steps[record.worker_id] = steps_s
        return steps_s

    def kept(self, block_size: int) -> int:
        """See RequestFacts.kept_tokens."""
        if block_size not in self._kept:
            self._kept[block_size] = self._request.kept_tokens(block_size)
        return self._kept[block_size]

    def uncached(self, candidate: Candidate) -> int:
        """The last token of a prompt is computed even if all of it is cached."""
        left = self._request.num_prompt_tokens - candidate.cached_tokens
        return left if left > 1 else 1

    def decode_harm_s(self, decode: Candidate, stall_s: float = 0.0) -> float:
        """What the others there lose to one more neighbour, all together, and to a prompt that
        stalls them. It hurts less the more slack they have."""
        before, after = self.steps_s(decode)
        lost_s = decode.requests * ((after - before) * self._output + stall_s)
        if math.isinf(decode.tightest_tpot_s):
            return lost_s
        return lost_s * min(after / decode.tightest_tpot_s, 1.0)

    def stall_s(self, decode: Candidate, after_s: float, step_s: float) -> float:
        """By which prompts that decode still computes `after_s` from now lengthen its steps: of
        each, the newcomer gets a token."""
        queue_s = self.decode_queue_s(decode)
        if queue_s <= after_s:
            return 0.0
        steps_s = step_s * _mixed_steps(decode, decode.prefilling[1])
        return (queue_s - after_s) * max(1.0 - steps_s / queue_s, 0.0)

    def prefill_only(self, prefill: Candidate) -> Cost:
        uncached = self.uncached(prefill)
        return Cost(
            waited_s=self._request.waited_s,
            admit_s=self._predictor.admit_s,
            queue_s=self.queue_s(prefill),
            prefill_s=self.prefill_s(prefill),
            cached_tokens=self._request.num_prompt_tokens - uncached,
            uncached_tokens=uncached,
            ahead=prefill.requests,
        )

    def pair(self, prefill: Candidate, decode: Candidate) -> Cost:
        before, after = self.steps_s(decode)
        uncached, total = self.uncached(prefill), self._request.num_prompt_tokens
        missing = max(self.kept(decode.record.layout.block_size) - decode.cached_tokens, 1)
        token_bytes = shipped_per_token(prefill.record, decode.record)
        # What earlier chunks computed has been sent beside the computing of later ones, unless a
        # policy drops some of it in the end.
        whole = self.kept(decode.record.layout.block_size) < total
        exposed = missing if whole else min(missing, uncached, prefill.record.chunk_size)
        queue_s, prefill_s = self.queue_s(prefill), self.prefill_s(prefill)
        return Cost(
            waited_s=self._request.waited_s,
            admit_s=self._predictor.admit_s,
            queue_s=queue_s,
            prefill_s=prefill_s,
            transfer_s=self._predictor.transfer_s(
                prefill.record, decode.record, exposed * token_bytes
            ),
            stall_s=self.stall_s(decode, queue_s + prefill_s, after),
            step_s=after,
            output_tokens=self._output,
            others=decode.requests,
            others_before_s=before,
            others_after_s=after if decode.requests else 0.0,
            harm_s=self.decode_harm_s(decode),
            cached_tokens=total - uncached,
            uncached_tokens=uncached,
            transfer_bytes=round(missing * token_bytes),
            free_blocks=decode.free_blocks,
            ahead=prefill.requests + decode.requests,
        )

    def decode_alone(self, decode: Candidate) -> Cost:
        """The prompt in mixed batches: its steps are longer for everybody there."""
        predictor, record, others = self._predictor, decode.record, decode.requests
        before, after = self.steps_s(decode)
        uncached = self.uncached(decode)
        cached = self._request.num_prompt_tokens - uncached
        prefill_s = predictor.prefill_s(record, uncached, cached, others, decode.tokens)
        prefill_s *= slowed(decode.company)
        step_s = before * predictor.tokens_per_step(record)
        stall_s = max(prefill_s - step_s * _mixed_steps(decode, uncached), 0.0)
        return Cost(
            waited_s=self._request.waited_s,
            admit_s=predictor.admit_s,
            queue_s=self.decode_queue_s(decode),
            prefill_s=prefill_s,
            step_s=after,
            output_tokens=self._output,
            others=others,
            others_before_s=before,
            # Many answers are shorter than the mean, and are well under way already.
            others_after_s=after + stall_s / max(self._output / 4, 1) if others else 0.0,
            harm_s=self.decode_harm_s(decode, stall_s),
            cached_tokens=cached,
            uncached_tokens=uncached,
            free_blocks=decode.free_blocks,
            ahead=others + decode.prefilling[0],
        )


def _mixed_steps(decode: Candidate, tokens: int) -> int:
    return -(-tokens // max(decode.record.chunk_size - decode.requests, 1))


def shipped_per_token(prefill: WorkerRecord, decode: WorkerRecord) -> float:
    """Bytes, as the pair's last hand-off was encoded; else as prefill's cache holds them, scales
    not counted."""
    link, layout = prefill.link_to.get(decode.address), prefill.layout
    if link is not None and link.token_bytes:
        return link.token_bytes
    values = 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim
    return values * BYTES_PER_VALUE.get(layout.dtype.partition("/")[0], 2)
