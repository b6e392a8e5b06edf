"""What holds for every request, cluster and policy."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cluster.workers import Role, WorkerLoad
from router.placement import POLICIES, Candidate, NoRoom, NoWorker, Plan, RequestFacts, Rules, place
from router.predictor import Predictor
from router.targets import Targets
from tests.support.candidates import record, speed
from tests.support.stub_workers import LAYOUT

LAYOUTS = tuple(
    dataclasses.replace(LAYOUT, dtype=dtype)
    for dtype in ("float32", "int8/float32", "int4/float32")
)


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    found = []
    for number in range(draw(st.integers(0, 8))):
        worker = record(
            draw(st.sampled_from(Role)),
            f"w{number}",
            layout=draw(st.sampled_from(LAYOUTS)),
            load=WorkerLoad(draining=draw(st.integers(0, 3)) == 0),
            max_model_len=draw(st.sampled_from([128, 4096])),
            max_num_seqs=8,
            profile=speed(draw(st.sampled_from([0.5, 1.0, 3.0]))),
        )
        found.append(
            Candidate(
                worker,
                requests=(requests := draw(st.integers(0, 8))),
                tokens=requests * draw(st.integers(1, 300)),
                free_blocks=draw(st.integers(0, 200)),
                cached_tokens=16 * draw(st.integers(0, 4)),
                tightest_tpot_s=draw(st.sampled_from([0.03, 0.1, float("inf")])),
            )
        )
    return found


facts = st.builds(
    RequestFacts,
    num_prompt_tokens=st.integers(64, 600),
    max_tokens=st.integers(1, 200),
    n=st.integers(1, 3),
    targets=st.builds(
        Targets,
        ttft_s=st.floats(0.01, 3.0),
        tpot_s=st.floats(0.005, 0.2),
        priority=st.integers(-3, 3),
    ),
    waited_s=st.floats(0, 1),
    number=st.integers(0, 100),
)
rules = st.builds(
    Rules,
    decode_prefills=st.sampled_from(["never", "fallback", "auto"]),
    backlog_s=st.sampled_from([0.2, 2.0]),
)
policies = st.sampled_from(sorted(POLICIES))


def chosen(
    policy: str, request: RequestFacts, found: list[Candidate], allowed: Rules
) -> Plan | None:
    try:
        return place(POLICIES[policy](), request, found, Predictor(), allowed)
    except (NoWorker, NoRoom):
        return None


@settings(max_examples=150, deadline=None)
@given(policies, facts, candidates(), rules)
def test_no_policy_uses_a_draining_full_small_or_mismatched_worker(
    policy: str, request: RequestFacts, found: list[Candidate], allowed: Rules
) -> None:
    plan = chosen(policy, request, found, allowed)
    if plan is None:
        return
    by_id = {candidate.record.worker_id: candidate for candidate in found}
    for worker in filter(None, (plan.prefill, plan.decode)):
        assert not worker.load.draining
        assert worker.max_model_len >= request.num_prompt_tokens
    if plan.decode is not None:
        decode = by_id[plan.decode.worker_id]
        assert plan.decode.role is Role.DECODE
        assert plan.decode.max_model_len >= request.num_prompt_tokens + request.max_tokens
        assert decode.requests == 0 or decode.requests + request.n <= plan.decode.max_num_seqs
        held = decode.cached_tokens // 16
        assert decode.free_blocks + held >= -(-request.num_prompt_tokens // 16) + request.n
    if plan.prefill is not None:
        assert plan.prefill.role is Role.PREFILL
        plain = plan.prefill.layout.dtype == "float32"  # it is converted to anything
        assert plan.decode is None or plain or plan.prefill.layout == plan.decode.layout
    else:
        assert allowed.decode_prefills != "never"
    assert plan.decode is not None or not request.needs_decode


@settings(max_examples=150, deadline=None)
@given(facts, candidates(), rules, st.floats(1, 10), st.floats(1, 10))
def test_more_slack_never_makes_a_choice_worse(
    request: RequestFacts,
    found: list[Candidate],
    allowed: Rules,
    ttft_factor: float,
    tpot_factor: float,
) -> None:
    """Not more missed, and among choices that keep every promise not dearer."""
    targets = request.targets
    slack = dataclasses.replace(
        targets, ttft_s=targets.ttft_s * ttft_factor, tpot_s=targets.tpot_s * tpot_factor
    )
    tight = chosen("slo", request, found, allowed)
    loose = chosen("slo", request._replace(targets=slack), found, allowed)
    if tight is None or loose is None:
        return
    assert loose.miss <= tight.miss
    if tight.miss == 0:
        assert loose.cost.total_s <= tight.cost.total_s


@settings(max_examples=100, deadline=None)
@given(facts, candidates(), rules)
def test_the_choice_does_not_depend_on_the_order_of_the_workers(
    request: RequestFacts, found: list[Candidate], allowed: Rules
) -> None:
    one = chosen("slo", request, found, allowed)
    other = chosen("slo", request, found[::-1], allowed)
    assert (one and one.rank) == (other and other.rank)


@settings(max_examples=100, deadline=None)
@given(facts, candidates(), rules)
def test_the_joint_choice_is_the_best_of_all_pairs(
    request: RequestFacts, found: list[Candidate], allowed: Rules
) -> None:
    """Ranking each role by itself first loses nothing while transfers are alike."""
    from router.placement.options import Options

    try:
        options = Options(request, found, Predictor(), allowed)
        plan = POLICIES["slo"]().choose(options)
    except (NoWorker, NoRoom):
        return
    ways = [options.pair(p, d) for d in options.decodes for p in options.matching(d)]
    ways += [options.decode_alone(d) for d in options.decodes if options.may_prefill(d)]
    ways += [options.prefill_only(p) for p in options.prefills if not request.needs_decode]
    assert plan.rank == min(way.rank for way in ways)
