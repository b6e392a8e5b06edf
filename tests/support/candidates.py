"""Workers as placement sees them, with speeds that a test can reckon with."""

import dataclasses
from typing import Any

from baton.cluster.workers import Role, WorkerLoad, WorkerRecord
from baton.step_totals import StepTotals, chunk_attention
from router.placement import Candidate
from tests.support.stub_workers import LAYOUT

PREFILL_STEP_S, TOKEN_S = 0.010, 0.001
DECODE_STEP_S, SEQUENCE_S = 0.020, 0.002


def speed(factor: float = 1.0) -> tuple[StepTotals, ...]:
    """A profile: prefill takes 10 ms a step and 1 ms a token, decode 20 ms and 2 ms a sequence."""
    prefill = [
        StepTotals(1, size, chunk_attention(0, size), 0, 0, factor * (0.010 + 0.001 * size))
        for size in (16, 64, 256, 512)
    ]
    decode = [
        StepTotals(1, 0, 0, size, size * context, factor * (0.020 + 0.002 * size))
        for size in (1, 8, 32)
        for context in (20, 200)
    ]
    mixed = [
        StepTotals(1, 64, chunk_attention(0, 64), n, 40 * n, factor * (0.074 + 0.002 * n))
        for n in (4, 16)
    ]
    return (*prefill, *decode, *mixed)


def record(role: Role, name: str, **changes: Any) -> WorkerRecord:
    base = WorkerRecord(
        worker_id=name,
        incarnation="1",
        role=role,
        address=f"{name}:1",
        model="m",
        layout=LAYOUT,
        max_model_len=4096,
        max_num_seqs=64,
        num_blocks=1000,
        load=WorkerLoad(free_blocks=1000),
        profile=speed(),
    )
    return dataclasses.replace(base, **changes)


def prefill(name: str = "p", requests: int = 0, tokens: int = 0, **fields: Any) -> Candidate:
    """`fields` are those of the candidate or of its record."""
    return _candidate(Role.PREFILL, name, requests, tokens, fields)


def decode(name: str = "d", requests: int = 0, tokens: int = 0, **fields: Any) -> Candidate:
    return _candidate(Role.DECODE, name, requests, tokens, fields)


def _candidate(
    role: Role, name: str, requests: int, tokens: int, fields: dict[str, Any]
) -> Candidate:
    own = {key: fields.pop(key) for key in list(fields) if key in Candidate._fields}
    worker = record(role, name, **fields)
    return Candidate(worker, requests, tokens, **{"free_blocks": 1000, **own})
