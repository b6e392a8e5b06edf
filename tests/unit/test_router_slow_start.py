"""A newcomer among others is given more and more; a new cluster is not held back."""

import pytest

from baton.cluster.workers import Role, WorkerRecord
from router.placement import POLICIES, NoRoom, Plan, RequestFacts, Rules, place
from router.placement.facts import Candidate
from router.predictor import Predictor
from router.slow_start import LEAST_SHARE, SlowStart
from tests.support.candidates import decode, prefill, record

FACTS = RequestFacts(num_prompt_tokens=100, max_tokens=50, n=1)


def worker(name: str, role: Role = Role.DECODE, life: str = "1") -> WorkerRecord:
    return record(role, name, incarnation=f"{name}-{life}")


def test_a_share_grows_with_age_and_then_stays_whole() -> None:
    start, old, new = SlowStart(10.0), worker("old"), worker("new")
    start.saw([old], 100.0)
    start.saw([old, new], 200.0)
    assert (start.share(old), start.share(new)) == (1.0, LEAST_SHARE)
    start.saw([old, new], 205.0)
    assert start.share(new) == pytest.approx(0.5)
    start.saw([old, new], 210.0)
    assert start.share(new) == 1.0


def test_a_restarted_worker_is_a_newcomer() -> None:
    start, first, second = SlowStart(10.0), worker("a"), worker("b")
    start.saw([first, second], 0.0)
    start.saw([first], 50.0)
    start.saw([first, worker("b", life="2")], 51.0)
    assert start.share(worker("b", life="2")) == LEAST_SHARE


def test_a_role_without_settled_workers_starts_at_once() -> None:
    start, old = SlowStart(10.0), worker("p", Role.PREFILL)
    start.saw([], 0.0)
    start.saw([old], 1.0)
    both = [old, worker("d0"), worker("d1")]
    start.saw(both, 20.0)
    assert [start.share(w) for w in both] == [1.0, 1.0, 1.0]
    start.saw([*both, worker("p1", Role.PREFILL)], 21.0)
    assert start.share(worker("p1", Role.PREFILL)) == LEAST_SHARE


def test_workers_of_before_the_router_are_settled() -> None:
    start, workers = SlowStart(10.0), [worker("d0"), worker("d1")]
    start.saw(workers, 0.0)
    assert [start.share(w) for w in workers] == [1.0, 1.0]


def test_no_time_turns_it_off() -> None:
    start, old, new = SlowStart(0.0), worker("old"), worker("new")
    start.saw([old], 0.0)
    start.saw([old, new], 1.0)
    assert start.share(new) == 1.0


def plan(*candidates: Candidate, policy: str) -> Plan:
    rules = Rules(decode_prefills="never", backlog_s=1.0)
    return place(POLICIES[policy](), FACTS, candidates, Predictor(), rules)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_newcomer_is_not_flooded_by_any_policy(policy: str) -> None:
    """Of 64 sequences a fifth; the busier worker, or the queue, takes the others."""
    busy, full = decode("busy", 40, 4000), decode("new", 12, 1200, share=0.2)
    chosen = plan(prefill(), busy, full, policy=policy).decode
    assert chosen is not None and chosen.worker_id == "busy"
    with pytest.raises(NoRoom, match="decode"):
        plan(prefill(), decode("busy", 64, 6400), full, policy=policy)
    waiting = prefill("new", 2, 300, share=0.2)
    served = plan(prefill("busy", 4, 700), waiting, decode(), policy=policy).prefill
    assert served is not None and served.worker_id == "busy"


@pytest.mark.parametrize("policy", POLICIES)
def test_an_idle_newcomer_is_always_used(policy: str) -> None:
    chosen = plan(prefill(share=0.2), decode(share=0.2, max_num_seqs=1), policy=policy)
    assert chosen.prefill and chosen.decode
