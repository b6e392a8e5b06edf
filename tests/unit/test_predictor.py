"""Latency is learned from step totals: seeded, refined, robust, and honest about its error."""

import dataclasses
import random

import pytest

from baton.cluster.workers import Role, WorkerLink
from baton.step_totals import StepTotals, chunk_attention
from router.predictor import Phase, Predictor
from router.predictor.least_squares import OnlineLeastSquares
from tests.support.candidates import record


def prefill_totals(uncached: int, cached: int = 0, speed: float = 1.0) -> StepTotals:
    steps, attended = -(-uncached // 512), chunk_attention(cached, uncached)
    seconds = speed * (0.025 * steps + 0.0003 * uncached + 5e-8 * attended)
    return StepTotals(steps, uncached, attended, 0, 0, seconds)


def decode_totals(steps: int, batch: int, context: int, speed: float = 1.0) -> StepTotals:
    seconds = speed * steps * (0.020 + 0.0012 * batch + 2e-6 * batch * context)
    return StepTotals(steps, 0, 0, steps * batch, steps * batch * context, seconds)


PROFILE = (
    *(prefill_totals(size) for size in (16, 64, 256, 512, 1024)),
    *(decode_totals(4, batch, 40) for batch in (1, 16, 64)),
    decode_totals(4, 1, 520),
)
P = record(Role.PREFILL, "p", profile=PROFILE)
D = record(Role.DECODE, "d", profile=PROFILE)


def test_a_profile_is_enough_to_predict_what_was_not_measured() -> None:
    predictor = Predictor()
    assert predictor.prefill_s(P, 700, 300) == pytest.approx(
        prefill_totals(700, 300).seconds, rel=0.03
    )
    assert predictor.token_s(D, (8, 8 * 100))[0] == pytest.approx(
        decode_totals(1, 8, 100).seconds, rel=0.05
    )


def test_after_200_requests_the_error_of_every_phase_is_below_ten_percent() -> None:
    """A machine half as fast as its profile, 5 % noise, and 1 sample in 50 five times too long."""
    predictor, rng = Predictor(), random.Random(7)

    def noisy(totals: StepTotals) -> StepTotals:
        noise = rng.lognormvariate(0, 0.05) * (5 if rng.random() < 0.02 else 1)
        return dataclasses.replace(totals, seconds=totals.seconds * noise)

    for _ in range(400):
        uncached, cached = rng.randint(10, 2000), rng.choice([0, 256, 1024])
        predictor.saw_steps(P, noisy(prefill_totals(uncached, cached, 2.0)))
        totals = decode_totals(rng.randint(5, 50), rng.randint(1, 40), rng.randint(50, 900), 2.0)
        predictor.saw_steps(D, noisy(totals))
        sent = rng.randint(10_000, 5_000_000)
        seconds = (0.002 + sent / 1e9) * rng.lognormvariate(0, 0.05)
        predictor.saw_transfer(P, D, "shm", sent, seconds)
    for uncached, cached in ((50, 0), (900, 1024), (1900, 0)):
        expected = prefill_totals(uncached, cached, 2.0).seconds
        assert predictor.prefill_s(P, uncached, cached) == pytest.approx(expected, rel=0.1)
    for batch, context in ((1, 100), (8, 300), (32, 800)):
        expected = decode_totals(1, batch, context, 2.0).seconds
        assert predictor.token_s(D, (batch, batch * context))[0] == pytest.approx(expected, rel=0.1)
    for phase in Phase:
        error = predictor.mape(phase)
        assert error is not None and error < 0.1, phase


def test_a_lasting_change_is_learned_and_a_hiccup_is_not() -> None:
    model = OnlineLeastSquares(1)
    for _ in range(50):
        model.learn((1.0,), 0.1)
    model.learn((1.0,), 5.0)
    assert model.predict((1.0,)) == pytest.approx(0.1, rel=0.15)
    for _ in range(30):
        model.learn((1.0,), 0.3)
    assert model.predict((1.0,)) == pytest.approx(0.3, rel=0.1)


def test_no_cost_becomes_negative() -> None:
    model, rng = OnlineLeastSquares(3), random.Random(1)
    for _ in range(200):
        x = (1.0, rng.random(), rng.random())
        model.learn(x, max(0.001, 0.1 + rng.gauss(0, 0.05) - 0.05 * x[2]))
    assert model.predict((0, 1, 0)) >= 0 and model.predict((0, 0, 1)) >= 0


def test_a_mixed_step_costs_its_prompt_and_its_decodes() -> None:
    predictor, rng = Predictor(), random.Random(3)
    for _ in range(100):
        size, batch, context = rng.randint(16, 400), rng.randint(0, 30), rng.randint(20, 400)
        decodes = StepTotals(
            0, 0, 0, batch, batch * context, 0.0012 * batch + 2e-6 * batch * context
        )
        predictor.saw_steps(D, prefill_totals(size) + decodes)
    expected = prefill_totals(200).seconds + 0.0012 * 10 + 2e-6 * 10 * 100
    assert predictor.prefill_s(D, 200, 0, 10, 1000) == pytest.approx(expected, rel=0.05)


def test_an_unknown_worker_is_predicted_like_its_peers() -> None:
    predictor, new = Predictor(), record(Role.PREFILL, "new", profile=())
    assert predictor.prefill_s(new, 100) == 0.0 and not predictor.knows(new)
    for size in (50, 100, 400):
        predictor.saw_steps(P, prefill_totals(size))
    assert predictor.knows(new)
    assert predictor.prefill_s(new, 200) == pytest.approx(prefill_totals(200).seconds, rel=0.05)


def test_links_are_told_apart_by_transport() -> None:
    predictor = Predictor()
    for _ in range(10):
        predictor.saw_transfer(P, D, "shm", 1_000_000, 0.001)
        predictor.saw_transfer(P, D, "grpc", 1_000_000, 0.010)
    by_shm = record(Role.PREFILL, "p", links=(WorkerLink(D.address, "shm"),))
    by_grpc = record(Role.PREFILL, "p", links=(WorkerLink(D.address, "grpc"),))
    assert predictor.transfer_s(by_shm, D, 1_000_000) == pytest.approx(0.001, rel=0.1)
    assert predictor.transfer_s(by_grpc, D, 1_000_000) == pytest.approx(0.010, rel=0.1)


def test_the_first_hand_off_of_a_link_says_nothing_of_the_next() -> None:
    """It opens connections: 300 ms were expected of all links, of which each took 3."""
    predictor, other = Predictor(), record(Role.DECODE, "other")
    for decode in (D, other):
        predictor.saw_transfer(P, decode, "shm", 400_000, 0.3)
    for _ in range(2):
        predictor.saw_transfer(P, D, "shm", 400_000, 0.003)
    predictor.saw_transfer(P, other, "shm", 400_000, 0.003)
    assert (predictor.mape(Phase.TRANSFER) or 0.0) < 0.01
    assert predictor.transfer_s(P, D, 400_000) == pytest.approx(0.003, rel=0.01)


def test_a_young_link_leans_on_what_others_of_its_transport_took() -> None:
    predictor, others = Predictor(), [record(Role.DECODE, f"d{n}") for n in range(4)]
    for decode in others:
        for sent in (1_000, 23_000, 1_000_000, 10_000_000):
            predictor.saw_transfer(P, decode, "", sent, 0.002 + sent / 1e9)
    for sent in (10_000_000, 10_000_000, 23_000):
        predictor.saw_transfer(P, D, "", sent, 0.002 + sent / 1e9)
    assert predictor.transfer_s(P, D, 500_000) == pytest.approx(0.0025, rel=0.1)


def test_workers_that_are_gone_are_forgotten() -> None:
    predictor = Predictor()
    predictor.saw_steps(P, prefill_totals(100))
    predictor.saw_transfer(P, D, "shm", 1000, 0.001)
    predictor.saw_transfer(P, D, "shm", 1000, 0.001)
    predictor.keep_only([D])
    assert predictor.mape(Phase.TRANSFER) is None and predictor.mape(Phase.PREFILL) is None


def test_what_a_worker_took_in_its_old_role_is_forgotten_with_it() -> None:
    predictor, changed = Predictor(), record(Role.DECODE, "p", profile=())
    predictor.saw_steps(P, prefill_totals(100))
    predictor.saw_transfer(P, D, "shm", 1000, 0.001)
    predictor.saw_transfer(P, D, "shm", 1000, 0.001)
    assert not predictor.knows(changed) and predictor.prefill_s(changed, 100) == 0.0
    predictor.keep_only([changed, D])
    assert predictor.mape(Phase.TRANSFER) is None and predictor.mape(Phase.PREFILL) is None


def test_answers_are_expected_to_be_as_long_as_they_were() -> None:
    predictor = Predictor()
    assert predictor.output_tokens(100) == 100
    for _ in range(100):
        predictor.saw_output(20)
    assert predictor.output_tokens(100) == pytest.approx(20)
    assert predictor.output_tokens(5) == 5
