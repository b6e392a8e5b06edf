"""`baton bench` against a server with known timing, beside a second, independent client."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from baton.cli.bench import Bench, bench
from baton.cluster.errors import BatonError
from baton.loadgen.client import Outcome, Target
from baton.loadgen.metrics import Targets, summarise
from baton.loadgen.runner import Load, run
from baton.loadgen.workload import PlannedRequest, synthetic
from tests.support.metronome import Metronome, running_metronome
from tests.support.stopwatch import timed_post

AT_ONCE = [0.0]


async def outcomes_of(
    server: Metronome, planned: list[PlannedRequest], load: Load, **target: Any
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    await run(Target(server.url, "metronome", **target), planned, load, outcomes.append)
    return outcomes


async def second_client(url: str, request: PlannedRequest) -> tuple[float, float]:
    """TTFT and TPOT over a bare socket; shares nothing with the load generator."""
    body = {"prompt": request.token_ids(), "max_tokens": request.max_tokens}
    timed = await timed_post(int(url.rpartition(":")[2]), "/v1/completions", body, "second")
    times = [at for at, data in timed.arrivals if b'"choices":[{' in data]
    assert len(times) == request.max_tokens, "two chunks came at once"
    return times[0], (times[-1] - times[0]) / (request.max_tokens - 1)


@pytest.mark.slow
async def test_two_independent_clients_agree_within_3_percent() -> None:
    """The best of four each: a stall of a busy machine can only make a client see more."""
    planned = synthetic(AT_ONCE * 4, 64, 9)
    ours: list[Outcome] = []
    theirs: list[tuple[float, float]] = []
    async with running_metronome(ttft_s=1.0, step_s=0.06) as server:
        for request in planned:
            outcomes, second = await asyncio.gather(
                outcomes_of(server, [request], Load(True, 1)), second_client(server.url, request)
            )
            ours += outcomes
            theirs.append(second)
    ttfts = min(o.ttft_s for o in ours), min(ttft for ttft, _ in theirs)
    tpots = min(o.tpot_s or 0 for o in ours), min(tpot for _, tpot in theirs)
    assert ttfts[0] == pytest.approx(ttfts[1], rel=0.03)
    assert tpots[0] == pytest.approx(tpots[1], rel=0.03)


async def test_each_gap_is_what_the_server_wrote() -> None:
    async with running_metronome(ttft_s=0.05, step_s=0.03, split_events=True) as server:
        (outcome,) = await outcomes_of(server, synthetic(AT_ONCE, 8, 10), Load(True, 1))
        arrived, *writes = server.sent[0]
    assert outcome.error is None and outcome.output_tokens == 10
    assert len(outcome.itl_s) == 9
    # A chunk cannot be seen before it was written, whatever the machine does.
    assert outcome.latency_s >= writes[-1] - arrived - 1e-3
    assert outcome.ttft_s + sum(outcome.itl_s) == pytest.approx(outcome.latency_s)
    assert outcome.tpot_s == pytest.approx((outcome.latency_s - outcome.ttft_s) / 9)


async def test_a_closed_loop_keeps_so_many_in_flight_and_no_more() -> None:
    async with running_metronome(ttft_s=0.02, step_s=0.002) as server:
        peak = await peak_in_flight(server, synthetic(AT_ONCE * 20, 8, 5), Load(True, 4))
    assert peak == 4 and len(server.bodies) == 20


async def test_an_open_loop_sends_at_its_times_and_within_its_bound() -> None:
    times = [0.0, 0.05, 0.1, 0.15]
    async with running_metronome(ttft_s=0.01) as server:
        outcomes = await outcomes_of(server, synthetic(times, 8, 3), Load(False, 100))
        outcomes.sort(key=lambda outcome: outcome.planned_at)
        assert [o.planned_at for o in outcomes] == times
        assert all(o.sent_at >= o.planned_at for o in outcomes)
        peak = await peak_in_flight(server, synthetic(AT_ONCE * 9, 8, 3), Load(False, 2))
    assert peak <= 2


async def peak_in_flight(server: Metronome, planned: list[PlannedRequest], load: Load) -> int:
    begun = len(server.sent)
    outcomes = await outcomes_of(server, planned, load)
    assert all(outcome.error is None for outcome in outcomes)
    spans = [(times[0], times[-1]) for times in server.sent[begun:]]
    return max(sum(a <= start < b for a, b in spans) for start, _ in spans)


async def test_failures_are_counted_by_what_the_server_said() -> None:
    async with running_metronome(ttft_s=0.001, step_s=0.0, fail_every=3) as server:
        outcomes = await outcomes_of(server, synthetic(AT_ONCE * 9, 8, 2), Load(True, 3))
    figures = summarise(outcomes, 1.0, Targets())
    assert (figures["completed"], figures["failed"]) == (6, 3)
    assert list(figures["errors"].values()) == [3] and "503" in next(iter(figures["errors"]))
    gone = await outcomes_of(server, synthetic(AT_ONCE, 8, 2), Load(True, 1))
    assert gone[0].error is not None and "Connect" in gone[0].error


async def test_prompts_go_as_ids_as_text_or_as_chat() -> None:
    async with running_metronome(ttft_s=0.001, step_s=0.0) as server:
        planned = synthetic(AT_ONCE, 12, 2)
        await outcomes_of(server, planned, Load(True, 1))
        await outcomes_of(server, planned, Load(True, 1), prompt_as_text=True)
        await outcomes_of(server, planned, Load(True, 1), path="/v1/chat/completions")
    ids, text, chat = server.bodies
    assert ids["prompt"] == planned[0].token_ids() and ids["ignore_eos"] is True
    assert len(text["prompt"].split()) == 12
    assert chat["messages"][0]["content"] == text["prompt"]


def command(url: str, **values: Any) -> Bench:
    given: dict[str, Any] = {
        "model": None,
        "endpoint": "completions",
        "requests": 6,
        "concurrency": 2,
        "rate": None,
        "burstiness": 1.0,
        "trace": None,
        "scale_length": 1.0,
        "scale_time": 1.0,
        "input_tokens": 8,
        "output_tokens": 4,
        "shared_prefix": 0,
        "spread": 0.0,
        "seed": 0,
        "prompt_as_text": False,
        "ignore_eos": True,
        "timeout_s": 30.0,
        "targets": Targets(),
    }
    return Bench(url=url, **{**given, **values})


def read_json(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result


async def run_command(what: Bench, path: Path, sweep: bool = False) -> dict[str, Any]:
    await asyncio.to_thread(bench, what, sweep, path, True)
    return read_json(path)


@pytest.mark.parametrize("kind", ["mooncake", "azure", "plain"])
async def test_the_command_replays_each_kind_of_trace(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / ("t.csv" if kind == "azure" else "t.jsonl")
    if kind == "mooncake":
        rows = [
            {"timestamp": i * 20, "input_length": 1024, "output_length": 96, "hash_ids": [0, i]}
            for i in range(1, 6)
        ]
        trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "azure":
        lines = [f"2023-11-16 18:15:46.{i}000000,1024,96" for i in range(1, 6)]
        trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    else:
        trace.write_text('{"input_tokens": 1024, "output_tokens": 96}\n' * 5)
    async with running_metronome(ttft_s=0.002, step_s=0.001) as server:
        what = command(server.url, trace=trace, concurrency=None, scale_length=1 / 32)
        result = await run_command(what, tmp_path / "out.json")
    assert result["figures"]["completed"] == 5 and result["model"] == "metronome"
    assert [body["max_tokens"] for body in server.bodies] == [3] * 5
    prompts = sorted(server.bodies, key=lambda body: body["prompt"])
    assert all(len(body["prompt"]) == 32 for body in prompts)
    shared = {tuple(body["prompt"][:16]) for body in prompts}
    assert len(shared) == (1 if kind == "mooncake" else 5)
    assert len({tuple(body["prompt"]) for body in prompts}) == 5
    assert "TTFT" in capsys.readouterr().out
    assert len(result["samples"]) == 5


async def test_a_sweep_finds_where_targets_break(tmp_path: Path) -> None:
    """The server needs 0.1 s for a first token; a target below that is met at no rate."""
    async with running_metronome(ttft_s=0.1, step_s=0.0) as server:
        hopeless = command(server.url, rate=50.0, targets=Targets(ttft_s=0.01), requests=1)
        result = await run_command(hopeless, tmp_path / "out.json", sweep=True)
    assert result["knee"] is None and len(result["sweep"]) == 10
    assert all(not row["good"] and row["attainment"] == 0 for row in result["sweep"])


async def test_a_rate_has_the_timeout_that_was_asked_for(tmp_path: Path) -> None:
    """It had the default: a request that nobody answers was waited for 600 s."""
    async with running_metronome(ttft_s=60.0, step_s=0.0) as server:
        what = command(server.url, rate=50.0, requests=1, timeout_s=0.3)
        with pytest.raises(BatonError, match="No request to"):
            await run_command(what, tmp_path / "out.json")


async def test_a_server_that_is_not_there_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BatonError, match="--model"):
        await asyncio.to_thread(bench, command("http://127.0.0.1:9"), False, None, False)
    with pytest.raises(BatonError, match="No request to"):
        named = command("http://127.0.0.1:9", model="m")
        await asyncio.to_thread(bench, named, False, None, False)


async def test_keys_in_headers_are_not_written_down(tmp_path: Path) -> None:
    async with running_metronome(ttft_s=0.001, step_s=0.0) as server:
        what = command(server.url, headers={"authorization": "Bearer secret"})
        await run_command(what, tmp_path / "out.json")
    text = json.dumps(read_json(tmp_path / "out.json"))
    assert "secret" not in text and "authorization" in text
