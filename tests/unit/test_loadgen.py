"""What is planned and how figures are made: traces, arrivals, metrics, the knee."""

import json
import math
import statistics
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.loadgen.arrivals import arrival_times
from baton.loadgen.client import Outcome, SseReader
from baton.loadgen.metrics import Targets, percentile, summarise
from baton.loadgen.sweep import RateSearch
from baton.loadgen.traces import TraceError, TraceRow, plan, read_trace
from baton.loadgen.workload import synthetic


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def mooncake(at: int, length: int, blocks: list[int], output: int = 100) -> dict[str, object]:
    return {
        "timestamp": at,
        "input_length": length,
        "output_length": output,
        "hash_ids": blocks,
    }


# --- traces ---------------------------------------------------------------------------------


def test_a_mooncake_trace_keeps_its_times_and_shared_prefixes(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        mooncake(3000, 1300, [0, 1, 2]),
        mooncake(0, 1100, [0, 1, 9]),
        mooncake(4500, 512, [7]),
    )
    planned = plan(read_trace(path), scale_length=1, scale_time=0.5)
    assert [request.at_s for request in planned] == [0.0, 1.5, 2.25]
    first, second, third = (request.token_ids() for request in planned)
    assert (len(first), len(second), len(third)) == (1100, 1300, 512)
    assert first[:1024] == second[:1024] and first[1024:1100] != second[1024:1100]
    assert not set(map(tuple, [third[:16]])) & {tuple(first[:16])}


@given(st.integers(1, 6), st.integers(1, 512), st.sampled_from([1, 0.5, 1 / 32, 1 / 512]))
def test_scaled_blocks_stay_equal_where_they_were_equal(full: int, rest: int, scale: float) -> None:
    length = 512 * full + rest
    ids = tuple(range(full))
    rows = [TraceRow(0, length, 64, (*ids, 100)), TraceRow(0, length, 64, (*ids, 200))]
    one, two = (request.token_ids() for request in plan(rows, scale, 1))
    shared = full * max(1, round(512 * scale))
    assert one[:shared] == two[:shared] and one != two
    assert len(one) == len(two) <= max(length * scale + full + 1, full + 1)


def test_an_azure_trace_is_read_with_its_seven_digit_fractions(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    planned = plan(read_trace(path), 1, 1)
    assert planned[1].at_s == pytest.approx(4.314579)
    assert [(r.num_prompt_tokens, r.max_tokens) for r in planned] == [(374, 44), (396, 109)]
    assert planned[0].token_ids()[:8] != planned[1].token_ids()[:8]


def test_plain_lines_carry_text_or_lengths(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "Say hi to them", "output_tokens": 5},
        {"input_tokens": 10, "output_tokens": 7, "timestamp": 2},
    )
    one, two = plan(read_trace(path), 1, 1)
    assert one.words() == "Say hi to them" and one.max_tokens == 5
    assert two.at_s == 2 and len(two.token_ids()) == 10 and len(two.words().split()) == 10


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([mooncake(0, 600, [1])], "request 1: input_length needs 2 hash_ids, there are 1"),
        ([mooncake(0, 5, [1]), {"output_tokens": 3}], "request 2: 'input_tokens' is missing"),
        ([{"input_tokens": 0, "output_tokens": 3}], "request 1: lengths must be at least 1"),
        ([[1]], "request 1"),
        ([], "has no requests"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(
    tmp_path: Path, rows: list[object], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path / "t.jsonl", *rows))


def test_a_csv_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(TraceError, match="ContextTokens"):
        read_trace(path)


def test_the_first_requests_of_a_trace_are_enough(tmp_path: Path) -> None:
    rows = [{"input_tokens": n, "output_tokens": 1} for n in range(1, 50)]
    assert len(read_trace(write(tmp_path / "p.jsonl", *rows), limit=3)) == 3


# --- arrivals and synthetic prompts ---------------------------------------------------------


@given(st.integers(2, 300), st.floats(0.1, 100), st.sampled_from([0.2, 1.0, 4.0, math.inf]))
def test_arrivals_start_at_zero_keep_their_rate_and_never_go_back(
    count: int, rate: float, burstiness: float
) -> None:
    times = arrival_times(count, rate, burstiness, seed=3)
    assert len(times) == count and times[0] == 0.0 and times == sorted(times)
    assert times[-1] == pytest.approx((count - 1) / rate)
    assert times == arrival_times(count, rate, burstiness, seed=3)


def test_gaps_have_the_variation_that_burstiness_asks_for() -> None:
    def variation(burstiness: float) -> float:
        times = arrival_times(20_000, 10, burstiness, seed=1)
        gaps = [b - a for a, b in pairwise(times)]
        return statistics.pstdev(gaps) / statistics.fmean(gaps)

    assert variation(1.0) == pytest.approx(1.0, abs=0.05)
    assert variation(0.25) == pytest.approx(2.0, abs=0.15)
    assert variation(math.inf) == pytest.approx(0.0, abs=1e-6)


def test_synthetic_prompts_share_a_prefix_and_differ_behind_it() -> None:
    one, two = synthetic([0.0, 0.0], 50, 8, shared_prefix=32, spread=0.2, seed=5)
    assert one.token_ids()[:32] == two.token_ids()[:32]
    assert one.token_ids()[32:40] != two.token_ids()[32:40]
    assert 72 <= len(one.token_ids()) <= 92
    assert one == synthetic([0.0], 50, 8, 32, 0.2, seed=5)[0]


# --- figures --------------------------------------------------------------------------------


def outcome(ttft: float, latency: float, tokens: int, error: str | None = None) -> Outcome:
    return Outcome(0.0, 0.0, ttft, latency, [0.01], 10, 0, tokens, error)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    assert percentile(sorted(values), percent) == pytest.approx(expected)


def test_figures_are_defined_as_vllm_defines_them() -> None:
    outcomes = [outcome(0.1, 1.1, 11), outcome(0.3, 0.8, 6), outcome(0.2, 0.2, 1)]
    outcomes.append(outcome(0.0, 0.0, 0, error="HTTP 503"))
    figures = summarise(outcomes, 2.0, Targets(ttft_s=0.25, tpot_s=0.15))
    assert (figures["completed"], figures["failed"]) == (3, 1)
    assert figures["request_throughput"] == pytest.approx(1.5)
    assert figures["output_throughput"] == pytest.approx(9)
    assert figures["total_throughput"] == pytest.approx(24)
    assert figures["tpot_ms"]["mean"] == pytest.approx(100)  # (1.1-0.1)/10 and (0.8-0.3)/5
    assert figures["ttft_ms"]["p50"] == pytest.approx(200)
    assert figures["goodput"] == pytest.approx(1.0), "the second misses TTFT, the failed one counts"
    assert figures["attainment"] == pytest.approx(0.5)
    assert figures["errors"] == {"HTTP 503": 1}


def test_goodput_needs_targets_and_no_success_is_no_distribution() -> None:
    figures = summarise([outcome(0, 0, 0, "x")], 1.0, Targets())
    assert figures["goodput"] is None and figures["ttft_ms"] is None


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12))
def test_events_survive_any_cut(cuts: list[int]) -> None:
    data = b'data: {"a":1}\r\n\r\n: ping\n\ndata: {"a":2}\n\ndata: [DONE]\n\n'
    reader, found, at = SseReader(), [], 0
    data = data.replace(b"\r\n", b"\n")
    for cut in [*cuts, len(data)]:
        found += reader.feed(data[at : at + cut])
        at += cut
    assert [event["a"] for event in found] == [1, 2] and reader.done


# --- the knee -------------------------------------------------------------------------------


def figures_at(rate: float, capacity: float, targets: bool) -> dict[str, object]:
    attained = min(1.0, capacity / rate)
    ttft = 100.0 if rate <= capacity else 100.0 * (rate / capacity) ** 4
    return {
        "attainment": attained if targets else None,
        "ttft_ms": {"p50": ttft},
        "failed": 0,
    }


@given(st.floats(0.3, 200), st.booleans())
def test_the_knee_is_within_a_tenth_of_the_capacity(capacity: float, targets: bool) -> None:
    search = RateSearch(0.25 if not targets else 1.0, max_steps=40)
    while (rate := search.next_rate()) is not None:
        search.note(rate, figures_at(rate, capacity, targets))
    edge = capacity / 0.9 if targets else capacity * 2**0.25
    assert search.knee is not None
    assert edge * 0.89 <= search.knee <= edge * 1.0001


def test_a_search_ends_even_when_no_rate_is_good() -> None:
    search = RateSearch(8.0, max_steps=6)
    while (rate := search.next_rate()) is not None:
        search.note(rate, {"attainment": 0.0, "ttft_ms": None, "failed": 9})
    assert search.knee is None and len(search.tried) == 6
    assert Counter(good for _, good in search.tried) == {False: 6}
