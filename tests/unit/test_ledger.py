"""What is noted while a request runs becomes named phases and figures."""

import sys
from pathlib import Path
from types import SimpleNamespace

import orjson
import pyarrow.parquet as pq
import pytest

from baton.cluster.errors import SettingsError
from baton.cluster.ledger import CallTrail, Ledger, Recent
from baton.cluster.ledger.log import LedgerLog
from baton.cluster.ledger.parquet import ROWS

SKEW = 5000.0


def step(
    start: float, end: float, tokens: int, context: int, batch: int = 1, drafted: int = 0
) -> SimpleNamespace:
    return SimpleNamespace(
        start=start + SKEW,
        end=end + SKEW,
        batch_size=batch,
        num_tokens=tokens,
        context=context,
        num_drafted_tokens=drafted,
    )


def note_prefill(call: CallTrail) -> None:
    """Sent at 1.0; 10 ms on the way, queued to 1.1, two chunks to 1.5, shipped until 1.6."""
    call.greeted(1.01 + SKEW, 1.02 + SKEW, 1.03)
    call.span("prefill_queue", 1.01 + SKEW, 1.1 + SKEW)
    call.step(step(1.1, 1.3, 64, 64), 1.51)
    call.step(step(1.3, 1.5, 10, 74), 1.51)
    call.span("kv_transfer", 1.3 + SKEW, 1.4 + SKEW)
    call.span("kv_transfer", 1.5 + SKEW, 1.6 + SKEW, bytes=1000, blocks=5, transport="shm")


def served() -> Ledger:
    ledger = Ledger("req-1", "chat", started=0.9, started_at=1.7e9, answer_id="chatcmpl-1")
    ledger.own.span("receive", 0.9, 0.95)
    trail = ledger.trail()
    trail.span("admission", 0.95, 1.0)
    note_prefill(trail.call("prefill-0", "prefill", 1.0, attempt=1))
    trail.delivered(1, 1.51, 1.512, 1.513, 1.52)
    decode = trail.call("decode-0", "decode", 0.96, attempt=1)
    decode.greeted(0.97 + SKEW, 0.97 + SKEW, 0.98)
    decode.span("decode_admit", 1.6 + SKEW, 1.62 + SKEW)
    for k in range(2):
        decode.step(step(1.62 + k * 0.05, 1.66 + k * 0.05, 1, 75 + k, batch=3), 1.67 + k * 0.05)
        trail.delivered(1, 1.67 + k * 0.05, 1.671 + k * 0.05, 1.672 + k * 0.05, 1.673 + k * 0.05)
    ledger.end(200, 1.73)
    return ledger


def durations(ledger: Ledger, *, overlapped: bool = False) -> dict[str, float]:
    found: dict[str, float] = {}
    for phase in ledger.phases:
        if phase.overlapped == overlapped:
            found[phase.name] = found.get(phase.name, 0.0) + phase.duration
    return found


def test_the_phases_of_three_clocks_sum_to_the_wall_clock() -> None:
    ledger = served()
    counted = [phase for phase in ledger.phases if not phase.overlapped]
    assert sum(phase.duration for phase in counted) == pytest.approx(1.73 - 0.9)
    names = [phase.name for phase in counted if phase.name != "rpc"]
    assert names[:2] == ["receive", "admission"]
    assert names[2:5] == ["prefill_queue", "prefill", "prefill"]
    assert names.index("kv_transfer") < names.index("decode_admit")
    assert names.index("decode_admit") < names.index("first_decode_step")
    assert names.index("first_decode_step") < names.index("decode_step")


def test_worker_times_are_placed_within_the_clock_error() -> None:
    ledger = served()
    error = max(call.clock.error or 0 for call in ledger.calls)
    assert 0 < error <= 0.01
    found = durations(ledger)
    assert found["prefill"] == pytest.approx(0.4, abs=error)
    assert found["first_decode_step"] == pytest.approx(0.04, abs=error)


def test_transfer_is_split_into_exposed_and_overlapped() -> None:
    transfer = served().timing()["transfer"]
    assert transfer["total_ms"] == pytest.approx(200, abs=1)
    # The first 100 ms run beside the second chunk, 10 ms beside the router's delivery.
    assert transfer["overlapped_ms"] == pytest.approx(110, abs=11)
    assert transfer["exposed_ms"] + transfer["overlapped_ms"] == pytest.approx(200, abs=0.01)
    assert (transfer["bytes"], transfer["blocks"], transfer["transports"]) == (1000, 5, ["shm"])


@pytest.mark.parametrize("attempt", [1, 2])  # 2: it took over for another
def test_a_transfer_ends_where_decode_takes_it_up_however_late_its_sender_hears_of_that(
    attempt: int,
) -> None:
    """A prefill worker that got the processor late told of a transfer after the first decode
    step: the wait between two steps was called transfer."""
    ledger = Ledger("req-1", "chat", started=0.9, started_at=1.7e9, answer_id="chatcmpl-1")
    trail = ledger.trail()
    prefill = trail.call("prefill-0", "prefill", 1.0, attempt=attempt)
    prefill.greeted(1.01 + SKEW, 1.02 + SKEW, 1.03)
    prefill.step(step(1.3, 1.5, 10, 74), 1.51)
    prefill.span("kv_transfer", 1.5 + SKEW, 1.7 + SKEW)
    decode = trail.call("decode-0", "decode", 1.0, attempt=1)
    decode.greeted(1.01 + SKEW, 1.02 + SKEW, 1.03)
    decode.span("decode_admit", 1.6 + SKEW, 1.62 + SKEW)
    decode.step(step(1.62, 1.66, 1, 75), 1.69)
    decode.step(step(1.68, 1.72, 1, 76), 1.73)
    ledger.end(200, 1.75)
    names = [phase.name for phase in ledger.phases if phase.name in ("kv_transfer", "decode_wait")]
    assert names == ["kv_transfer", "decode_wait"]
    assert ledger.timing()["transfer"]["total_ms"] == pytest.approx(100, abs=0.01)


def test_a_decode_worker_that_refused_does_not_hide_where_a_transfer_ends() -> None:
    """A refused call of the same attempt has taken nothing up: the transfer lasted to the end."""
    ledger = Ledger("req-1", "chat", started=0.9, started_at=1.7e9)
    trail = ledger.trail()
    trail.call("decode-9", "decode", 0.95, attempt=1)
    prefill = trail.call("prefill-0", "prefill", 1.0, attempt=1)
    prefill.greeted(1.01 + SKEW, 1.02 + SKEW, 1.03)
    prefill.step(step(1.3, 1.5, 10, 74), 1.51)
    prefill.span("kv_transfer", 1.5 + SKEW, 1.7 + SKEW)
    decode = trail.call("decode-0", "decode", 1.0, attempt=1)
    decode.greeted(1.01 + SKEW, 1.02 + SKEW, 1.03)
    decode.step(step(1.6, 1.66, 1, 75), 1.69)
    ledger.end(200, 1.75)
    assert ledger.timing()["transfer"]["total_ms"] == pytest.approx(100, abs=0.01)


def test_what_a_sender_waits_for_after_decode_took_it_up_is_no_transfer() -> None:
    """A commit goes with the last frame: on a busy machine its sender waited 27 ms to hear of it,
    all of them after the first decode step."""
    ledger = Ledger("req-1", "chat", started=0.9, started_at=1.7e9, answer_id="chatcmpl-1")
    trail = ledger.trail()
    prefill = trail.call("prefill-0", "prefill", 1.0, attempt=1)
    prefill.greeted(1.01 + SKEW, 1.02 + SKEW, 1.03)
    prefill.step(step(1.3, 1.5, 10, 74), 1.51)
    prefill.span("kv_transfer", 1.5 + SKEW, 1.6 + SKEW)
    prefill.span("kv_transfer", 1.663 + SKEW, 1.69 + SKEW, bytes=9, blocks=1, transport="shm")
    decode = trail.call("decode-0", "decode", 1.0, attempt=1)
    decode.greeted(1.01 + SKEW, 1.02 + SKEW, 1.03)
    for k in range(3):
        decode.step(step(1.62 + k * 0.06, 1.66 + k * 0.06, 1, 75 + k), 1.69 + k * 0.06)
    ledger.end(200, 1.9)
    names = [phase.name for phase in ledger.phases if phase.name != "rpc"]
    assert names == ["prefill", "kv_transfer", "first_decode_step"] + 2 * [
        "decode_wait",
        "decode_step",
    ]
    transfer = ledger.timing()["transfer"]
    assert transfer["exposed_ms"] == pytest.approx(100, abs=0.01) and transfer["bytes"] == 9


def test_steps_carry_batch_and_context() -> None:
    phases = served().timing()["phases"]
    decode = [p for p in phases if p["name"] == "decode_step" and not p["overlapped"]]
    assert decode[0]["batch_size"] == 3 and decode[0]["context"] == 76
    prefill = [p for p in phases if p["name"] == "prefill"]
    assert [p["tokens"] for p in prefill if not p["overlapped"]] == [64, 10]
    assert {p["where"] for p in prefill} == {"prefill-0"}


def test_first_token_and_time_per_token_are_what_the_client_was_sent() -> None:
    ledger = served()
    assert ledger.ttft_s == pytest.approx(1.52 - 0.9)
    assert ledger.tpot_s == pytest.approx((1.723 - 1.52) / 2)
    assert ledger.num_output_tokens == 3


def test_a_preempted_sequence_waits_and_recomputes() -> None:
    ledger = Ledger("r", "chat", 0.0, 0.0)
    call = ledger.trail().call("d", "decode", 0.0, attempt=1)
    call.greeted(SKEW, SKEW, 0.0)
    call.step(step(0.1, 0.2, 1, 33), 0.2)
    call.step(step(0.5, 0.7, 34, 34), 0.7)  # all of it again, after a wait
    call.step(step(0.7, 0.8, 1, 35), 0.8)
    ledger.end(200, 1.0)
    found = durations(ledger)
    assert found["preempted"] == pytest.approx(0.3)
    assert found["recompute"] == pytest.approx(0.2)
    assert found["decode_step"] == pytest.approx(0.1)


def test_a_lost_attempt_is_retry_before_the_first_token_and_migration_after_it() -> None:
    ledger = Ledger("r", "chat", 0.0, 0.0)
    trail = ledger.trail()
    trail.lost(0.1, 0.4, "p", "gone")
    trail.delivered(1, 0.5, 0.5, 0.5, 0.5)
    trail.lost(0.4, 0.9, "d", "gone")
    ledger.end(200, 1.0)
    found = durations(ledger)
    assert found["retry"] == pytest.approx(0.3)
    assert found["migration"] == pytest.approx(0.4)


def test_a_worker_that_reports_no_times_leaves_a_gap_only() -> None:
    ledger = Ledger("r", "chat", 0.0, 0.0)
    trail = ledger.trail()
    trail.call("old", "prefill", 0.0, attempt=1)
    trail.delivered(1, 0.5, 0.5, 0.6, 0.6)
    ledger.end(200, 1.0)
    assert durations(ledger) == pytest.approx({"rpc": 0.9, "flush": 0.1})


def recent_of(capacity: int, *ids: str, max_bytes: int = 10**6) -> Recent:
    recent = Recent(capacity, max_bytes)
    for name in ids:
        ledger = Ledger(name, "chat", 0.0, 0.0, answer_id=f"answer-{name}")
        ledger.trail().delivered(1, 0, 0, 0, 0)
        recent.add(ledger)
    return recent


def test_recent_requests_are_bounded_and_found_by_either_id() -> None:
    recent = recent_of(2, "a", "b", "c")
    assert [ledger.request_id for ledger in recent] == ["c", "b"]
    assert recent.find("a") is None and recent.find("answer-a") is None
    found = recent.find("answer-b")
    assert found is not None and found.request_id == "b"


def test_recent_requests_are_bounded_in_bytes_but_keep_the_last_one() -> None:
    assert len(recent_of(10, "a", "b", "c", max_bytes=64)) == 2
    assert len(recent_of(10, "a", max_bytes=0)) == 1


def test_an_id_used_twice_names_the_newest_even_after_the_older_one_is_gone() -> None:
    recent = recent_of(2, "same", "same", "other")
    found = recent.find("same")
    assert found is not None and len(recent) == 2


def test_an_id_that_two_tenants_use_names_the_own_one_to_each_and_the_newest_to_all() -> None:
    recent = Recent(2)
    for tenant in ("a", "b"):
        ledger = Ledger("same", "chat", 0.0, 0.0)
        ledger.aims(tenant, 1.0, 1.0)
        recent.add(ledger)
    older, newer = recent.find("same", "a"), recent.find("same", "b")
    assert older is not None and older.tenant == "a"
    assert newer is not None and newer is recent.find("same")
    assert recent.find("same", "c") is None
    recent.add(Ledger("other", "chat", 0.0, 0.0))
    assert recent.find("same", "a") is None and recent.find("same") is newer


def test_the_log_holds_whole_lines_and_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    line = len(orjson.dumps(served().as_json())) + 1
    log = LedgerLog(path, max_bytes=3 * line)
    for _ in range(20):
        log.write(served())
    log.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    assert all(file.stat().st_size <= 3 * line for file in files)
    rows = [orjson.loads(row) for row in path.read_bytes().splitlines()]
    assert rows and rows[0]["id"] == "req-1" and rows[0]["timing"]["phases"]


def test_a_parquet_log_is_bounded_and_holds_rows_with_their_phases(tmp_path: Path) -> None:
    path = tmp_path / "ledger.parquet"
    log = LedgerLog(path, max_bytes=1000)
    for _ in range(3 * ROWS + 3):
        log.write(served())
    with pytest.raises(SettingsError, match="cannot be written"):
        LedgerLog(path, max_bytes=1000)
    log.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, f"{path.name}.1"]
    rows = pq.read_table(path).to_pylist()
    assert rows[-1]["id"] == "req-1" and len(rows) == 3
    assert [phase["name"] for phase in rows[0]["phases"]][:2] == ["receive", "admission"]
    assert rows[0]["transfer"]["bytes"] == 1000
    assert pq.read_table(f"{path}.1").num_rows == ROWS


def test_a_parquet_log_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "baton.cluster.ledger.parquet", raising=False)
    with pytest.raises(SettingsError, match="extra 'parquet'"):
        LedgerLog(tmp_path / "ledger.parquet", max_bytes=1000)


def test_a_log_that_cannot_be_written_is_said_before_serving(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--ledger-log"):
        LedgerLog(tmp_path / "no" / "such" / "folder", max_bytes=1000)
