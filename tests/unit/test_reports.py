"""Reports merge, stay bounded, and count what happened."""

import itertools
import json
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.ledger import Ledger
from baton.cluster.reports import Collector, Filters, Group, Key, Sketch, Window, build_report
from baton.cluster.reports.collector import SAVED_S
from baton.cluster.reports.window import OTHER, Slot, merged
from tests.unit.test_ledger import served
from tests.unit.test_ledger_causes import request

values = st.lists(st.floats(1e-5, 1e3), min_size=1, max_size=200)


def sketch_of(numbers: list[float]) -> Sketch:
    sketch = Sketch()
    for number in numbers:
        sketch.add(number)
    return sketch


@given(values, values)
def test_merged_sketches_are_the_sketch_of_everything(one: list[float], two: list[float]) -> None:
    sketch = sketch_of(one)
    sketch.merge(sketch_of(two))
    whole = sketch_of(one + two)
    assert sketch.figures() == pytest.approx(whole.figures())
    assert sketch.count == len(one) + len(two) and sketch.most == max(one + two)


@given(values)
def test_a_sketch_survives_json(numbers: list[float]) -> None:
    sketch = sketch_of([0.0, *numbers])
    again = Sketch.from_json(json.loads(json.dumps(sketch.as_json())))
    assert again.figures() == pytest.approx(sketch.figures())


def test_quantiles_are_within_one_percent_and_memory_is_bounded() -> None:
    rng = random.Random(1)
    numbers = [rng.lognormvariate(-3, 2) for _ in range(20_000)]
    figures = sketch_of(numbers).figures()
    for percent in (50, 90, 95, 99):
        exact = float(np.percentile(numbers, percent, method="lower"))
        assert figures[f"p{percent}"] == pytest.approx(exact, rel=0.011)
    wide = sketch_of([10.0**power for power in range(-9, 10)] * 50)
    assert len(wide.as_json()["bins"]) <= 1024 and Sketch().figures() == {"count": 0}


def test_a_group_of_few_requests_takes_little_memory() -> None:
    """Rows of mostly empty bins: a router grew by 150 KB for every slot and pair of workers."""
    rng = random.Random(1)
    tracemalloc.start()
    group = Group()
    for _ in range(5):
        for number in range(45):
            group.observe(f"phase.{number}", rng.lognormvariate(-4, 1.5))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert group.sketches["phase.0"].count == 5 and size < 50_000


def collect(*ledgers: Ledger, now: float = 1000.0) -> Window:
    window = Window()
    collector = Collector(window)
    for ledger in ledgers:
        collector.add(ledger, now)
    return window


def report(window: Window, now: float = 1010.0, **filters: str) -> dict[str, object]:
    return build_report(window.slots, Filters(**filters), now)


def test_a_report_counts_requests_tokens_phases_and_misses() -> None:
    missed = request(queue=0.5, ttft_target_s=0.3, tpot_target_s=1.0)
    found = report(collect(missed, request(ttft_target_s=5.0), served()))
    assert found["requests"] == 3 and found["with_phases"] == 3
    assert found["misses"] == {"ttft": {"prefill_queue": 1}, "tpot": {}}
    assert found["attainment"] == pytest.approx(2 / 3)
    assert found["phases"]["prefill_queue"]["max"] == pytest.approx(500, rel=0.01)  # type: ignore[index]
    first = found["until_first_token"]
    assert first["prefill_queue"] == pytest.approx((500 + 10 + 90) / 3, rel=0.05)  # type: ignore[index]
    assert "first_decode_step" not in first  # type: ignore[operator]
    assert found["transfer"]["bytes"] == 1000  # type: ignore[index]
    assert found["steps"].keys() == {1, 4}  # type: ignore[union-attr]
    assert {row["worker"] for row in found["workers"]} == {"p", "d", "prefill-0", "decode-0"}  # type: ignore[union-attr, attr-defined]


def test_failed_and_left_requests_are_not_good() -> None:
    left, failed = request(), request()
    left.status, failed.status = 499, 503
    found = report(collect(request(), left, failed))
    assert (found["requests"], found["left"], found["failed"]) == (3, 1, 1)
    assert found["goodput"] == pytest.approx(1 / 15)  # one slot


def test_filters_choose_by_tenant_and_worker() -> None:
    mine, other = request(), served()
    mine.tenant, other.tenant = "a", "b"
    window = collect(mine, other)
    assert report(window, tenant="a")["requests"] == 1
    assert report(window, worker="decode-0")["requests"] == 1
    assert report(window, worker="p")["requests"] == 1
    assert report(window, model="none")["requests"] == 0


def test_phases_are_folded_within_a_share_of_the_time_and_figures_always() -> None:
    window, clock = Window(), itertools.count()
    # Each takes 1 s by this clock: 5 s are saved up, and 100 s later 5 s again, no more.
    collector = Collector(window, share=5 / SAVED_S, clock=lambda: float(next(clock)))
    for at in (1000.0, 1100.0):
        for _ in range(30):
            collector.add(request(), at)
    found = build_report(window.slots, Filters(), 1110)
    assert found["requests"] == 60 and found["with_phases"] == 10


def test_windows_of_two_routers_merge_to_one_report() -> None:
    one, two = collect(request(), now=1000), collect(request(), served(), now=1004)
    both = merged([*one.slots, *two.slots])
    found = build_report(both, Filters(), 1010)
    assert len(both) == 1 and found["requests"] == 3
    assert found["seconds"] == pytest.approx(15) or found["seconds"] == pytest.approx(20)


def test_slots_survive_json() -> None:
    window = collect(request(ttft_target_s=0.05), served())
    window.sample_pools({"d": 0.5}, 1000.0)
    again = [Slot.from_json(json.loads(json.dumps(slot.as_json()))) for slot in window.slots]
    one, two = build_report(again, Filters(), 1010), report(window)
    assert one.keys() == two.keys() and one["misses"] == two["misses"]
    assert one["ttft_ms"] == pytest.approx(two["ttft_ms"])
    assert one["phases"]["prefill"] == pytest.approx(two["phases"]["prefill"])  # type: ignore[index]
    assert one["workers"][0]["kv_pool"] == two["workers"][0]["kv_pool"]  # type: ignore[index]


def test_old_slots_go_and_many_groups_make_the_past_coarser() -> None:
    window = Window(slot_s=10, span_s=100, max_groups=4)
    for at in range(0, 300, 10):
        window.group(Key("m", "t", "p", "d"), float(at)).counters["requests"] += 1
    assert window.num_groups <= 5 and all(slot.end > 190 for slot in window.slots)
    total = sum(group.counters["requests"] for s in window.slots for group in s.groups.values())
    assert total >= 10


def test_what_was_read_from_a_window_is_changed_by_nothing_that_comes_later() -> None:
    """Another thread builds a report of it."""
    window = Window(slot_s=10, span_s=100, max_groups=3)

    def count(at: int, tenant: str) -> None:
        window.group(Key("m", tenant, "p", "d"), float(at)).observe("ttft", 1.0 + at)

    for at in (0, 10, 20):
        count(at, "a")
    window.sample_pools({"d": 0.5}, 20.0)
    found = window.since(0.0)
    before = json.dumps([slot.as_json() for slot in found])
    window.sample_pools({"d": 0.7}, 21.0)
    for at, tenant in ((22, "a"), (23, "b"), (30, "a"), (40, "b")):
        count(at, tenant)
    assert json.dumps([slot.as_json() for slot in found]) == before


def test_groups_beyond_the_bound_are_counted_as_other() -> None:
    window = Window(max_groups=3)
    for number in range(10):
        window.group(Key("m", f"t{number}", "p", "d"), 5.0).counters["requests"] += 1
    (slot,) = window.slots
    assert len(slot.groups) == 4 and slot.groups[OTHER].counters["requests"] == 7


def test_pools_are_averaged_and_their_peak_kept() -> None:
    window = Window()
    for share in (0.2, 0.6):
        window.sample_pools({"d": share}, 100.0)
    window.group(Key("m", "", "p", "d"), 100.0).merge(Group())
    window.slots[0].groups[Key("m", "", "p", "d")].counters["requests"] += 1
    (row,) = [
        row for row in build_report(window.slots, Filters(), 110)["workers"] if row["worker"] == "d"
    ]
    assert row["kv_pool"] == {"mean": pytest.approx(0.4), "max": 0.6}


def test_phases_stand_in_the_order_of_a_request() -> None:
    phases = list(report(collect(served()))["phases"])  # type: ignore[call-overload]
    assert phases.index("admission") < phases.index("prefill") < phases.index("decode_step")
