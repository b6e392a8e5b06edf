"""A miss names the cause whose removal would have met the target."""

from types import SimpleNamespace

import pytest

from baton.cluster.ledger import Ledger
from baton.cluster.ledger.causes import CAUSES, misses
from baton.cluster.ledger.miss import Miss

QUICK = 0.01


def step(start: float, end: float, batch: int, tokens: int, context: int) -> SimpleNamespace:
    sizes = {"batch_size": batch, "num_tokens": tokens, "context": context}
    return SimpleNamespace(start=start, end=end, num_drafted_tokens=0, **sizes)


def request(
    *,
    admission: float = QUICK,
    queue: float = QUICK,
    prefill: float = 0.1,
    transfer: float = QUICK,
    steps: list[tuple[float, int]] | None = None,
    known: int = 0,
    client: float = 0.0,
    retry: float = 0.0,
    preempted: float = 0.0,
    tokenise: float = 0.0,
    **targets: float,
) -> Ledger:
    """One request of 100 prompt tokens; all clocks are equal. `steps`: (seconds, batch size)."""
    ledger = Ledger("r", "chat", started=0.0, started_at=0.0, **targets)  # type: ignore[arg-type]
    ledger.num_prompt_tokens = 100
    trail, at = ledger.trail(), 0.0
    trail.num_known_tokens = known
    trail.span("tokenise", at, at + tokenise)
    at += tokenise
    trail.span("admission", at, at + admission)
    at += admission
    if retry:
        trail.lost(at, at + retry, "gone", "gone")
        at += retry
    call = trail.call("p", "prefill", at, attempt=1)
    call.greeted(at, at, at)
    call.span("prefill_queue", at, at + queue)
    at += queue
    call.step(
        step(at, at + prefill, 1, 100, 100),
        at + prefill,
    )
    at += prefill
    trail.delivered(1, at, at, at, at)
    call.span("kv_transfer", at, at + transfer)
    at += transfer
    decode = trail.call("d", "decode", 0.0, attempt=1)
    decode.greeted(0.0, 0.0, 0.0)
    context = 101
    for number, (seconds, batch) in enumerate(steps or [(0.02, 1)] * 4):
        if preempted and number == 2:
            at += preempted
            decode.step(step(at, at + 0.05, 1, context, context), at + 0.05)
            at += 0.05
            trail.delivered(1, at, at, at, at)
            context += 1
        decode.step(step(at, at + seconds, batch, 1, context), at + seconds)
        at += seconds
        trail.delivered(1, at, at, at, at + client)
        at += client
        context += 1
    ledger.end(200, at)
    return ledger


def one(ledger: Ledger, alone: float | None = 0.02) -> Miss:
    (miss,) = misses(ledger, lambda worker: alone)
    assert miss.cause in CAUSES
    return miss


PROVOKED = [
    (request(admission=0.5, ttft_target_s=0.3), "admission_queue"),
    (request(queue=0.5, ttft_target_s=0.3), "prefill_queue"),
    (request(prefill=0.5, ttft_target_s=0.3), "long_prompt"),
    (request(prefill=0.5, known=96, ttft_target_s=0.3), "cold_prefix"),
    (request(retry=0.5, ttft_target_s=0.3), "retry"),
    (request(transfer=0.4, tpot_target_s=0.03), "transfer"),
    (request(steps=[(0.08, 16)] * 6, tpot_target_s=0.03), "decode_batch"),
    (request(preempted=0.4, tpot_target_s=0.03), "preemption"),
    (request(client=0.2, tpot_target_s=0.03), "slow_client"),
    (request(tokenise=0.5, ttft_target_s=0.3), "router"),
]


def test_every_cause_is_provoked() -> None:
    assert {cause for _, cause in PROVOKED} | {"model"} == set(CAUSES)


@pytest.mark.parametrize(
    ("ledger", "cause"), PROVOKED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_each_cause_is_named_when_its_removal_would_have_met_the_target(
    ledger: Ledger, cause: str
) -> None:
    miss = one(ledger)
    assert (miss.cause, miss.sufficient) == (cause, True), miss
    without = sum(miss.shares.values()) - miss.shares[cause]
    allowed = sum(miss.shares.values()) * miss.target_s / miss.seen_s
    assert without <= allowed


def test_nothing_is_missed_without_targets_or_within_them() -> None:
    assert misses(request(), lambda worker: None) == []
    assert misses(request(ttft_target_s=10, tpot_target_s=10), lambda worker: None) == []


def test_two_targets_missed_are_two_misses() -> None:
    ledger = request(queue=0.5, transfer=0.4, ttft_target_s=0.3, tpot_target_s=0.03)
    found = {miss.target: miss.cause for miss in misses(ledger, lambda worker: 0.02)}
    assert found == {"ttft": "prefill_queue", "tpot": "transfer"}


def test_when_no_removal_suffices_the_largest_is_named_and_said_not_to() -> None:
    miss = one(request(admission=0.3, queue=0.2, prefill=0.2, ttft_target_s=0.1))
    assert (miss.cause, miss.sufficient) == ("admission_queue", False)


def test_a_model_that_is_too_slow_alone_is_named_itself() -> None:
    assert one(request(tpot_target_s=0.001), alone=0.02).cause == "model"
    assert one(request(tpot_target_s=0.001), alone=None).cause == "model"


def test_the_shares_are_the_whole_time() -> None:
    ledger = request(queue=0.5, ttft_target_s=0.3)
    assert sum(one(ledger).shares.values()) == pytest.approx(ledger.ttft_s)


def test_a_known_prefix_splits_prefill_into_cold_and_long() -> None:
    shares = one(request(prefill=0.4, known=75, ttft_target_s=0.1)).shares
    assert shares["cold_prefix"] == pytest.approx(0.3)
    assert shares["long_prompt"] == pytest.approx(0.1)
