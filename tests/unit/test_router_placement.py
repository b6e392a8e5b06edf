"""Placement is a pure choice: least loaded, same layout, big enough, not draining."""

import dataclasses

import pytest

from baton.cluster.workers import Role, WorkerLoad, WorkerRecord
from router.placement import LeastLoaded, NoWorker, RequestFacts
from tests.support.stub_workers import LAYOUT

FACTS = RequestFacts(num_prompt_tokens=100, max_tokens=50, n=1)


def worker(role: Role, name: str, running: int = 0, **changes: object) -> WorkerRecord:
    record = WorkerRecord(
        worker_id=name,
        incarnation="1",
        role=role,
        address="127.0.0.1:1",
        model="m",
        layout=LAYOUT,
        max_model_len=512,
        max_num_seqs=8,
        num_blocks=100,
        load=WorkerLoad(running=running),
    )
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]


def prefill(name: str = "p", running: int = 0, **changes: object) -> WorkerRecord:
    return worker(Role.PREFILL, name, running, **changes)


def decode(name: str = "d", running: int = 0, **changes: object) -> WorkerRecord:
    return worker(Role.DECODE, name, running, **changes)


def choose(*workers: WorkerRecord, facts: RequestFacts = FACTS, **in_flight: int):
    pair = LeastLoaded().choose(facts, workers, in_flight)
    return tuple(w.worker_id if w else None for w in (pair.prefill, pair.decode))


def test_the_least_loaded_of_each_role_is_chosen() -> None:
    assert choose(prefill("p1", 3), prefill("p2", 1), decode("d1", 0), decode("d2", 5)) == (
        "p2",
        "d1",
    )


def test_load_is_relative_to_a_workers_size() -> None:
    big, small = decode("big", 6, max_num_seqs=64), decode("small", 2, max_num_seqs=4)
    assert choose(prefill(), big, small) == ("p", "big")


def test_own_requests_count_before_the_next_heartbeat_shows_them() -> None:
    assert choose(prefill(), decode("d1"), decode("d2"), d1=3) == ("p", "d2")


def test_a_pair_shares_one_layout() -> None:
    other = dataclasses.replace(LAYOUT, dtype="bfloat16")
    workers = (prefill("p", layout=other), decode("d1", 0), decode("d2", 5, layout=other))
    assert choose(*workers) == ("p", "d2")
    with pytest.raises(NoWorker):
        choose(prefill("p", layout=other), decode("d1"))


def test_draining_and_too_small_workers_are_left_out() -> None:
    draining = WorkerLoad(draining=True)
    with pytest.raises(NoWorker, match="decode"):
        choose(prefill(), decode(load=draining), decode("d2", max_model_len=149))
    assert choose(prefill(max_model_len=100), decode(max_model_len=150)) == ("p", "d")


def test_the_missing_role_is_named() -> None:
    with pytest.raises(NoWorker, match="No prefill worker"):
        choose(decode())
    with pytest.raises(NoWorker, match="No decode worker"):
        choose(prefill())


def test_one_token_needs_no_decode_worker() -> None:
    assert choose(prefill(), facts=RequestFacts(10, 1, 1)) == ("p", None)
    with pytest.raises(NoWorker, match="No prefill worker"):
        choose(facts=RequestFacts(10, 1, 1))


def test_decode_prefills_itself_when_allowed_and_no_prefill_is_there() -> None:
    pair = LeastLoaded("decode").choose(FACTS, [decode()], {})
    assert (pair.prefill, pair.decode) == (None, decode())
