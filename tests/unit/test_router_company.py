"""Workers that share cores slow each other, and the router knows who has work."""

import dataclasses
import random

import pytest

from baton.cluster.load_ledger import LoadLedger
from baton.cluster.workers import Role, WorkerRecord
from baton.step_totals import StepTotals
from baton.v1 import common_pb2, decode_pb2
from router.company import Company
from router.hold import Hold
from router.placement import POLICIES, RequestFacts, Rules, place
from router.planner import Planner
from router.predictor import Phase, Predictor, slowed
from tests.support.candidates import decode, prefill, record


def on(name: str, *cores: int, host: str = "one") -> WorkerRecord:
    return record(Role.DECODE, name, address=f"{host}:{name}", cores=cores)


def seen(*workers: WorkerRecord) -> Company:
    company = Company()
    company.saw(workers)
    return company


def test_company_is_who_has_work_on_the_same_cores_of_the_same_host() -> None:
    company = seen(on("a", 0), on("b", 0), on("c", 1), on("d", 0, host="two"))
    for name in "bcd":
        company.stay(name, 0.0)
    assert company.now("a") == 1.0
    assert company.now("c") == company.now("d") == 0.0


def test_a_worker_that_was_given_no_cores_has_no_company() -> None:
    company = seen(on("a"), on("b"))
    company.stay("b", 0.0)
    assert company.now("a") == 0.0


def test_company_on_some_of_its_cores_counts_in_part() -> None:
    company = seen(on("wide", 0, 1, 2, 3), on("b", 0), on("c", 0))
    company.stay("b", 0.0)
    company.stay("c", 0.0)
    assert company.now("wide") == pytest.approx(0.5) and company.now("b") == 1.0


def test_a_stay_knows_for_which_part_of_it_others_had_work() -> None:
    company = seen(on("a", 0), on("b", 0))
    early = company.stay("b", 0.0)
    stay = company.stay("a", 10.0)
    early.end(12.0)
    late = company.stay("b", 15.0)
    assert stay.so_far(20.0) == pytest.approx(0.7)
    assert stay.end(20.0) == pytest.approx(0.7)
    late.end(30.0)
    assert company.now("a") == company.now("b") == 0.0


def test_what_is_ahead_is_half_who_has_work_now_and_half_who_had_it_lately() -> None:
    company = seen(on("a", 0), on("b", 0))
    assert company.ahead("a", 100.0) == 0.0
    stay = company.stay("b", 100.0)
    assert company.ahead("a", 100.0) == pytest.approx(0.5)
    assert 0.5 < company.ahead("a", 101.0) < company.ahead("a", 102.0) < 1.0
    assert company.ahead("a", 130.0) == pytest.approx(1.0, abs=1e-3)
    stay.end(130.0)
    assert company.ahead("a", 130.0) == pytest.approx(0.5, abs=1e-3)
    assert company.ahead("a", 160.0) == pytest.approx(0.0, abs=1e-3)


def test_two_requests_of_one_neighbour_are_one_engine() -> None:
    company = seen(on("a", 0), on("b", 0))
    stays = [company.stay("b", 0.0), company.stay("b", 1.0)]
    stays[0].end(2.0)
    stays[0].end(3.0)  # a stay ends once
    assert company.now("a") == 1.0
    stays[1].end(4.0)
    assert company.now("a") == 0.0 and company.seconds("a", 9.0) == pytest.approx(4.0)


def test_work_on_a_worker_that_has_gone_ends_without_a_trace() -> None:
    company = seen(on("a", 0), on("b", 0))
    stay = company.stay("b", 0.0)
    company.saw([on("a", 0)])
    stay.end(1.0)
    company.saw([on("a", 0), on("b", 0)])
    assert company.now("a") == 0.0


def test_steps_beside_others_are_predicted_within_ten_percent_when_the_company_is_known() -> None:
    predictor, rng = Predictor(), random.Random(3)
    worker = dataclasses.replace(on("a", 0), profile=())
    for _ in range(200):
        company, batch = rng.random(), rng.randint(1, 8)
        seconds = slowed(company) * 20 * (0.02 + 0.002 * batch) * rng.lognormvariate(0, 0.03)
        predictor.saw_steps(worker, StepTotals(20, 0, 0, 20 * batch, 400 * batch, seconds), company)
    assert (predictor.mape(Phase.DECODE) or 1.0) < 0.1
    alone = predictor.token_s(worker, (4, 80))[0]
    assert alone == pytest.approx(0.028, rel=0.05)


def test_of_equal_workers_the_one_without_company_is_chosen() -> None:
    candidates = [
        prefill("p0", company=1.0),
        prefill("p1"),
        decode("d0", company=1.0),
        decode("d1"),
    ]
    facts = RequestFacts(400, 20, 1)
    plan = place(POLICIES["slo"](), facts, candidates, Predictor(), Rules("never"))
    assert plan.prefill is not None and plan.prefill.worker_id == "p1"
    assert plan.decode is not None and plan.decode.worker_id == "d1"


def test_a_prompt_that_decode_computes_in_chunks_is_its_load_until_its_first_token() -> None:
    """The first chunk was once taken for the whole prompt."""
    workers = [record(Role.DECODE, "d")]
    planner, facts = Planner(POLICIES["slo"](), Rules("auto")), RequestFacts(400, 20, 1)
    planner.saw_workers(workers, 0.0)
    plan, loads = planner.plan(facts, workers), planner._loads
    with planner.hold(plan, facts) as hold:
        hold.heard("tokens", decode_pb2.GenerateEvent(tokens=decode_pb2.Tokens()))
        assert loads.load("d/prefill").requests == 1 and hold.ttft_s is None
        drawn = decode_pb2.Tokens(tokens=[common_pb2.Token()])
        hold.heard("tokens", decode_pb2.GenerateEvent(tokens=drawn))
        assert loads.load("d/prefill").requests == 0 and hold.ttft_s is not None


def test_what_the_router_gives_out_is_company_for_the_next() -> None:
    workers = [
        record(role, f"{role}-{core}", address=f"one:{role}{core}", cores=(core,))
        for role in Role
        for core in (0, 1)
    ]
    planner, facts = Planner(POLICIES["slo"](), Rules("never")), RequestFacts(400, 20, 1)
    planner.saw_workers(workers, 0.0)
    first = planner.plan(facts, workers)
    assert (first.prefill, first.decode) == (workers[0], workers[2])
    with planner.hold(first, facts) as hold:
        hold.heard("first_tokens", None)
        # Its decode worker has it now: the prefill worker on that core has company.
        second = planner.plan(facts, workers)
        assert second.prefill == workers[1]
    assert planner.plan(facts, workers).prefill == workers[0]


@pytest.mark.parametrize("handed_off", [True, False])
def test_prompts_computed_beside_an_answer_are_learned_with_the_company_of_their_worker(
    handed_off: bool,
) -> None:
    """After a hand-off they were learned with that of the prefill worker, on other cores."""
    learned: list[tuple[str, bool, float]] = []

    class Learning(Predictor):
        def saw_steps(self, worker: WorkerRecord, totals: StepTotals, company: float = 0.0) -> None:
            learned.append((worker.worker_id, totals.prefill_tokens > 0, company))

    workers = [
        record(Role.PREFILL, "p", address="one:1", cores=(0,)),
        record(Role.DECODE, "d", address="one:2", cores=(1,)),
        record(Role.DECODE, "beside", address="one:3", cores=(1,)),
    ]
    company = seen(*workers)
    planner, facts = Planner(POLICIES["slo"](), Rules("never")), RequestFacts(400, 20, 1)
    planner.saw_workers(workers, 0.0)
    plan = planner.plan(facts, workers[:2])
    if not handed_off:
        plan = plan._replace(prefill=None)
    company.stay("beside", 0.0)
    hold = Hold(plan, facts, LoadLedger(), Learning(), company, lambda: None)
    drawn = decode_pb2.Tokens(tokens=[common_pb2.Token()])
    heard = decode_pb2.GenerateEvent(tokens=drawn)
    hold.heard("first_tokens" if handed_off else "tokens", heard)
    steps = common_pb2.StepTotals(steps=1, prefill_tokens=8, seconds=0.1)
    done = decode_pb2.GenerateDone(prefill_steps=steps, decode_steps=common_pb2.StepTotals(steps=1))
    hold.heard("done", decode_pb2.GenerateEvent(done=done))
    assert [(name, mixed) for name, mixed, _ in learned] == [("d", True), ("d", False)]
    assert [found for _, _, found in learned] == pytest.approx([1.0, 1.0], abs=0.1)
