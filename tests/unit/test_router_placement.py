"""Placement is a pure choice: the rules that every policy keeps, and what each adds."""

import dataclasses
import inspect
import math

import pytest

import router.placement as placement
from baton.cluster.workers import WorkerLink, WorkerLoad
from baton.kv_policy import parse_policy
from router.placement import POLICIES, Candidate, NoRoom, NoWorker, Plan, RequestFacts, Rules, place
from router.predictor import Predictor
from router.targets import Targets
from tests.support.candidates import decode, prefill, speed
from tests.support.stub_workers import LAYOUT

FACTS = RequestFacts(num_prompt_tokens=100, max_tokens=50, n=1)
APART = Rules(decode_prefills="never", backlog_s=2.0)
every_policy = pytest.mark.parametrize("policy", POLICIES)


def plan(
    *candidates: Candidate,
    policy: str = "slo",
    facts: RequestFacts = FACTS,
    rules: Rules = APART,
    predictor: Predictor | None = None,
) -> Plan:
    return place(POLICIES[policy](), facts, candidates, predictor or Predictor(), rules)


def names(chosen: Plan) -> tuple[str | None, str | None]:
    return tuple(w.worker_id if w else None for w in (chosen.prefill, chosen.decode))  # type: ignore[return-value]


# --- what every policy keeps ----------------------------------------------------------------


@every_policy
def test_plain_kv_goes_to_any_dtype_and_quantized_kv_to_its_own(policy: str) -> None:
    other = dataclasses.replace(LAYOUT, dtype="int8/bfloat16")
    pair = (prefill("p", layout=other), decode("d1"), decode("d2", 5, 500, layout=other))
    assert names(plan(*pair, policy=policy)) == ("p", "d2")
    with pytest.raises(NoWorker, match="prefill"):
        plan(prefill("p", layout=other), decode("d1"), policy=policy)
    assert names(plan(prefill("p"), decode("d", layout=other), policy=policy)) == ("p", "d")
    larger = dataclasses.replace(other, block_size=2 * LAYOUT.block_size)
    with pytest.raises(NoWorker, match="prefill"):
        plan(prefill("p"), decode("d", layout=larger), policy=policy)


@every_policy
def test_draining_and_too_small_workers_are_left_out(policy: str) -> None:
    draining = WorkerLoad(free_blocks=1000, draining=True)
    with pytest.raises(NoWorker, match="decode"):
        plan(prefill(), decode(load=draining), decode("d2", max_model_len=149), policy=policy)
    with pytest.raises(NoWorker, match="decode"):
        plan(prefill(), decode(max_num_seqs=1), policy=policy, facts=FACTS._replace(n=2))
    small = (prefill(max_model_len=100), decode(max_model_len=150))
    assert names(plan(*small, policy=policy)) == ("p", "d")


@every_policy
def test_full_decode_workers_are_waited_for(policy: str) -> None:
    batch = decode("batch", 64, 6400)
    blocks = decode("blocks", free_blocks=7)
    with pytest.raises(NoRoom, match="decode"):
        plan(prefill(), batch, blocks, policy=policy)
    assert names(plan(prefill(), batch, blocks, decode("d", free_blocks=8), policy=policy)) == (
        "p",
        "d",
    )


@every_policy
def test_a_promise_of_decode_is_kept_whatever_its_load_and_nobody_waits_for_a_second_turn(
    policy: str,
) -> None:
    """Whoever took over for a lost prefill worker asked decode for the same room a second time,
    and joined the queue a second time: on busy workers the promise was lost, and the request."""
    promised = Rules(decode_prefills="never", backlog_s=math.inf, promised=True)
    late = FACTS._replace(targets=Targets(tpot_s=0.1))
    for at in (
        decode("d", 64, 6400),
        decode("d", free_blocks=0),
        decode("d", load=WorkerLoad(free_blocks=1000, draining=True)),
        decode("d", 20, 2000, tightest_tpot_s=0.065),
    ):
        chosen = plan(prefill("p", 5, 5000), at, policy=policy, facts=late, rules=promised)
        assert names(chosen) == ("p", "d")


@every_policy
def test_a_prompt_that_decode_holds_needs_less_room(policy: str) -> None:
    assert plan(prefill(), decode(free_blocks=4, cached_tokens=64), policy=policy).decode


@every_policy
def test_a_prefill_worker_with_a_long_queue_is_waited_for(policy: str) -> None:
    with pytest.raises(NoRoom, match="prefill"):
        plan(prefill(requests=5, tokens=5000), decode(), policy=policy)
    two = (prefill("busy", 5, 5000), prefill("p", 1, 100), decode())
    assert names(plan(*two, policy=policy)) == ("p", "d")


@every_policy
def test_the_missing_role_is_named(policy: str) -> None:
    with pytest.raises(NoWorker, match="No prefill worker"):
        plan(decode(), policy=policy)
    with pytest.raises(NoWorker, match="No decode worker"):
        plan(prefill(), policy=policy)


@every_policy
def test_one_token_needs_no_decode_worker(policy: str) -> None:
    one = RequestFacts(10, 1, 1)
    assert names(plan(prefill(), policy=policy, facts=one)) == ("p", None)
    with pytest.raises(NoWorker, match="No prefill worker"):
        plan(policy=policy, facts=one)


@every_policy
@pytest.mark.parametrize("rule", ["fallback", "auto"])
def test_decode_prefills_itself_when_no_prefill_worker_is_there(policy: str, rule: str) -> None:
    rules = Rules(decode_prefills=rule)  # type: ignore[arg-type]
    assert names(plan(decode(), policy=policy, rules=rules)) == (None, "d")


@every_policy
def test_a_policy_is_at_most_forty_lines_in_a_file_of_its_own(policy: str) -> None:
    source = inspect.getsource(inspect.getmodule(POLICIES[policy]))  # type: ignore[arg-type]
    assert len(source.splitlines()) <= 40
    assert placement.__name__ in POLICIES[policy].__module__


# --- the simple policies --------------------------------------------------------------------


def test_least_loaded_is_relative_to_a_workers_size() -> None:
    big, small = decode("big", 6, max_num_seqs=64), decode("small", 2, max_num_seqs=4)
    chosen = plan(prefill("p1", 3, 3), prefill("p2", 1, 1), big, small, policy="least_loaded")
    assert names(chosen) == ("p2", "big")


def test_least_loaded_believes_the_larger_of_report_and_own_count() -> None:
    reported = decode("d1", load=WorkerLoad(running=3, free_blocks=1000))
    assert names(plan(prefill(), reported, decode("d2", 1), policy="least_loaded"))[1] == "d2"


def test_round_robin_takes_turns() -> None:
    workers = (prefill("p1"), prefill("p2"), decode("d1"), decode("d2"))
    turns = [
        names(plan(*workers, policy="round_robin", facts=FACTS._replace(number=n)))
        for n in range(4)
    ]
    assert turns == [("p1", "d1"), ("p2", "d2")] * 2


def test_prefix_follows_the_longest_match_whatever_the_load() -> None:
    hot = prefill("hot", 20, 900, cached_tokens=64)
    assert names(plan(prefill("p"), hot, decode(), policy="prefix"))[0] == "hot"


def test_power_of_two_never_takes_the_more_loaded_of_its_two() -> None:
    workers = (prefill("p1"), prefill("p2", 3, 30), decode())
    for number in range(20):
        facts = FACTS._replace(number=number)
        assert names(plan(*workers, policy="power_of_two", facts=facts))[0] == "p1"


# --- slo ------------------------------------------------------------------------------------


def test_costs_add_up_as_the_profile_says() -> None:
    cost = plan(
        prefill(requests=1, tokens=200, cached_tokens=36), decode(requests=4, tokens=400)
    ).cost
    assert cost.queue_s == pytest.approx(0.210, rel=0.01)
    assert cost.prefill_s == pytest.approx(0.074, rel=0.01)
    assert cost.ttft_s == pytest.approx(0.284, rel=0.01)
    assert cost.others_before_s == pytest.approx(0.028, rel=0.02)
    assert cost.step_s == pytest.approx(0.030, rel=0.02)
    assert cost.harm_s == pytest.approx(4 * 0.002 * 50, rel=0.05)
    assert (cost.cached_tokens, cost.uncached_tokens) == (36, 64)


def test_a_cached_prefix_outweighs_a_short_queue_and_not_a_long_one() -> None:
    long = FACTS._replace(num_prompt_tokens=1000)
    for tokens, expected in ((500, "hot"), (1900, "cold")):
        hot = prefill("hot", 1, tokens, cached_tokens=960)
        assert names(plan(prefill("cold"), hot, decode(), facts=long))[0] == expected


def test_a_hot_prefix_spills_over_before_the_target_is_missed() -> None:
    targets = Targets(ttft_s=1.2)
    long = FACTS._replace(num_prompt_tokens=1000, targets=targets)
    for tokens, expected in ((500, "hot"), (1150, "cold")):
        hot = prefill("hot", 1, tokens, cached_tokens=960)
        chosen = plan(prefill("cold"), hot, decode(), facts=long)
        assert names(chosen)[0] == expected
        assert chosen.cost.ttft_s <= targets.ttft_s


def test_a_slow_worker_is_left_to_those_with_time() -> None:
    slow = prefill("slow", profile=speed(4.0))
    hurried = FACTS._replace(targets=Targets(ttft_s=0.3))
    busy = prefill("fast", 1, 140)
    assert names(plan(slow, busy, decode(), facts=hurried))[0] == "fast"


def test_others_promises_are_kept_unless_the_newcomer_ranks_higher() -> None:
    tight = decode("tight", 3, 300, tightest_tpot_s=0.030)
    full = decode("full", 20, 2000)
    own = Targets(tpot_s=0.100)
    polite = FACTS._replace(targets=own)
    assert names(plan(prefill(), tight, full, facts=polite))[1] == "full"
    first = FACTS._replace(targets=dataclasses.replace(own, priority=9))
    crowded = decode("full", 40, 4000)
    assert names(plan(prefill(), tight, crowded, facts=first))[1] == "tight"


def test_a_request_waits_rather_than_break_the_promises_to_those_who_decode() -> None:
    """Those who were decoding lost their targets as soon as load was above what decode can do."""
    promised = decode("d", 20, 2000, tightest_tpot_s=0.065)
    facts = FACTS._replace(targets=Targets(tpot_s=0.1))
    with pytest.raises(NoRoom, match="decode"):
        plan(prefill(), promised, facts=facts)
    raised = facts._replace(targets=Targets(tpot_s=0.1, priority=1))
    assert names(plan(prefill(), promised, facts=raised)) == ("p", "d")
    assert names(plan(prefill(), decode("d", 20, 2000), facts=facts)) == ("p", "d")


def test_a_short_prompt_goes_to_an_idle_decode_worker_when_prefill_is_busy() -> None:
    auto = Rules(decode_prefills="auto", backlog_s=2.0)
    short = RequestFacts(16, 50, 1)
    busy = prefill(requests=1, tokens=1000)
    assert names(plan(busy, decode(), facts=short, rules=auto)) == (None, "d")
    long = RequestFacts(1500, 50, 1)
    crowd = decode(requests=30, tokens=3000, tightest_tpot_s=0.2)
    assert names(plan(prefill(), crowd, facts=long, rules=auto)) == ("p", "d")


def test_a_long_prompt_waits_for_prefill_rather_than_stall_a_full_batch() -> None:
    auto = Rules(decode_prefills="auto", backlog_s=0.5)
    long = RequestFacts(1500, 50, 1)
    with pytest.raises(NoRoom, match="prefill"):
        plan(
            prefill(requests=1, tokens=600),
            decode(requests=50, tokens=5000),
            facts=long,
            rules=auto,
        )


def test_a_prompt_waits_for_its_twin_where_computing_it_elsewhere_takes_longer() -> None:
    """1 s of work is ahead of it, 1 s of its own is done there for the other one."""
    facts, rules = RequestFacts(1000, 50, 1), Rules(decode_prefills="never", backlog_s=0.25)
    twin = {"requests": 1, "tokens": 1000, "cached_tokens": 992}
    workers = prefill("idle"), decode()
    assert names(plan(prefill("twin", **twin), *workers, facts=facts, rules=rules))[0] == "twin"
    crowd = {**twin, "tokens": 1400}
    assert names(plan(prefill("twin", **crowd), *workers, facts=facts, rules=rules))[0] == "idle"
    other = {**twin, "cached_tokens": 0}
    with pytest.raises(NoRoom, match="prefill"):
        plan(prefill("other", **other), decode(), facts=facts, rules=rules)


def test_prompts_do_not_queue_up_at_a_decode_worker() -> None:
    auto = Rules(decode_prefills="auto", backlog_s=0.1)
    waiting = decode("d1", 3, 900, prefilling=(2, 300))
    assert names(plan(waiting, decode("d2", 40, 4000), rules=auto)) == (None, "d2")
    with pytest.raises(NoRoom):
        plan(waiting, rules=auto)


def test_decode_prefills_where_most_of_the_prompt_is_cached() -> None:
    auto = Rules(decode_prefills="auto", backlog_s=2.0)
    facts = RequestFacts(1000, 50, 1)
    workers = (prefill(), decode("d1"), decode("d2", cached_tokens=992))
    assert names(plan(*workers, facts=facts, rules=auto)) == (None, "d2")


def test_an_exposed_transfer_is_charged_to_the_pair_that_pays_it() -> None:
    predictor = Predictor()
    p, near, far = prefill(), decode("near"), decode("far")
    for _ in range(5):
        predictor.saw_transfer(p.record, near.record, "", 10_000, 0.002)
        predictor.saw_transfer(p.record, far.record, "", 10_000, 0.200)
    chosen = plan(p, far, near, predictor=predictor)
    assert names(chosen)[1] == "near"
    assert 0 < chosen.cost.transfer_s < 0.01


def test_prompts_that_decode_still_computes_when_it_gets_a_request_are_charged_to_it() -> None:
    """Two prompts of 300 tokens are 620 ms in two steps, of 22 ms without them; the request's own
    prompt takes 110 of them on prefill."""
    busy, free = decode("busy", prefilling=(2, 600)), decode("free", 2, 200)
    assert plan(prefill(), busy).cost.stall_s == pytest.approx(0.51 * 576 / 620, rel=0.02)
    assert plan(prefill(requests=1, tokens=600), busy).cost.stall_s == 0
    assert plan(prefill(), free).cost.stall_s == 0
    assert names(plan(prefill(), busy, free))[1] == "free"


def test_a_hand_off_is_priced_in_the_bytes_that_it_ships() -> None:
    """Raw bytes of decode's cache made an encoded or a quantized hand-off look twice as long."""
    encoded = prefill(links=(WorkerLink("d:1", "grpc", token_bytes=7),))
    assert plan(encoded, decode()).cost.transfer_bytes == 7 * 100
    quantized = dataclasses.replace(LAYOUT, dtype="int8/float32")
    values = 100 * 2 * LAYOUT.num_layers * LAYOUT.num_kv_heads * LAYOUT.head_dim
    for ours, theirs, num_bytes in (
        (LAYOUT, LAYOUT, 4 * values),
        (LAYOUT, quantized, 4 * values),  # decode encodes what comes plain
        (quantized, quantized, values),
    ):
        unknown = plan(prefill(layout=ours), decode(layout=theirs))
        assert unknown.cost.transfer_bytes == num_bytes


def test_what_a_policy_leaves_of_a_prompt_is_sent_after_the_first_token() -> None:
    predictor, p, d = Predictor(), prefill(chunk_size=64), decode()
    for sent in (10_000, 10_000, 100_000):
        predictor.saw_transfer(p.record, d.record, "", sent, sent / 1e6)
    cost = plan(p, d, facts=RequestFacts(1000, 50, 1), predictor=predictor).cost
    assert cost.transfer_bytes == 128 * 1000 and cost.transfer_s == pytest.approx(
        128 * 64 / 1e6, rel=0.01
    )
    dropping = RequestFacts(1000, 50, 1, kv_policy=parse_policy("snapkv(budget=0.25)"))
    cost = plan(p, d, facts=dropping, predictor=predictor).cost
    assert cost.transfer_bytes == 128 * 250 and cost.transfer_s == pytest.approx(
        128 * 250 / 1e6, rel=0.01
    )


def test_a_worker_whose_drafts_are_right_keeps_a_target_that_its_steps_alone_would_miss() -> None:
    predictor, facts = Predictor(), FACTS._replace(targets=Targets(tpot_s=0.02))
    slow = decode("drafts", profile=speed(2.0))
    workers = (prefill(), slow, decode("plain", 5, 500))
    assert names(plan(*workers, facts=facts, predictor=predictor)) == ("p", "plain")
    for _ in range(50):
        predictor.saw_drafts(slow.record, steps=10, computed=50, drawn=40)
    chosen = plan(*workers, facts=facts, predictor=predictor)
    assert names(chosen) == ("p", "drafts") and chosen.miss == 0
    assert chosen.cost.step_s == pytest.approx(2 * (0.020 + 5 * 0.002) / 4, rel=0.1)


def test_without_knowledge_nothing_is_missed_and_load_decides() -> None:
    bare = (prefill("p1", 9, 900, profile=()), prefill("p2", profile=()), decode(profile=()))
    chosen = plan(*bare, facts=FACTS._replace(targets=Targets(0.001, 0.001)))
    assert chosen.miss == 0 and math.isfinite(chosen.cost.total_s)
    assert names(chosen)[0] == "p2"
