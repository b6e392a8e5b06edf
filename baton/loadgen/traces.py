"""Recorded workloads: Mooncake JSONL, Azure CSV and plain JSONL, scaled to a smaller machine.

Mooncake (FAST'25): `timestamp` in ms, `input_length`, `output_length`, `hash_ids` of blocks of 512
tokens; equal ids at equal places are equal prefixes. Azure (2023): TIMESTAMP, ContextTokens,
GeneratedTokens. Plain: `prompt` (text) or `input_tokens`, `output_tokens`, and `timestamp` in s.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from baton.cluster.errors import BatonError
from baton.loadgen.workload import Piece, PlannedRequest

MOONCAKE_BLOCK = 512


class TraceError(BatonError):
    """The file is not a trace that can be read."""


@dataclass(frozen=True)
class TraceRow:
    """`blocks` are ids of `MOONCAKE_BLOCK` tokens each, the last one may be partly filled."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    text: str | None = None


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """Rows in order of time, the first one at 0. Raises TraceError, naming the line."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            parsed = _azure(file) if path.suffix.lower() == ".csv" else _jsonl(file)
            rows = _checked(path, islice(parsed, limit))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}.") from error
    if not rows:
        raise TraceError(f"{path} has no requests.")
    rows.sort(key=lambda row: row.at_s)
    first = rows[0].at_s
    return [
        TraceRow(row.at_s - first, row.input_tokens, row.output_tokens, row.blocks, row.text)
        for row in rows
    ]


def plan(rows: Iterable[TraceRow], scale_length: float, scale_time: float) -> list[PlannedRequest]:
    """Lengths and blocks times `scale_length`, times times `scale_time`."""
    return [
        PlannedRequest(
            row.at_s * scale_time,
            _pieces(row, number, scale_length),
            max(1, round(row.output_tokens * scale_length)),
            row.text,
        )
        for number, row in enumerate(rows)
    ]


def _pieces(row: TraceRow, number: int, scale: float) -> tuple[Piece, ...]:
    if not row.blocks:
        # No id of a block is negative, so a private prompt meets no shared one.
        return (Piece(-1 - number, max(1, round(row.input_tokens * scale))),)
    block = max(1, round(MOONCAKE_BLOCK * scale))
    rest = row.input_tokens - MOONCAKE_BLOCK * (len(row.blocks) - 1)
    last = max(1, min(block, round(rest * scale)))
    *whole, final = row.blocks
    return (*(Piece(seed, block) for seed in whole), Piece(final, last))


def _checked(path: Path, rows: Iterator[TraceRow]) -> list[TraceRow]:
    found: list[TraceRow] = []
    try:
        for row in rows:
            if row.input_tokens < 1 or row.output_tokens < 1:
                raise ValueError("lengths must be at least 1")
            found.append(row)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise TraceError(f"{path}, request {len(found) + 1}: {what}.") from error
    return found


def _azure(file: Iterable[str]) -> Iterator[TraceRow]:
    # Digits beyond microseconds are cut: fromisoformat takes at most six.
    reader = csv.DictReader(file)
    wanted = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    if not wanted <= set(reader.fieldnames or ()):
        raise ValueError(f"the CSV needs the columns {', '.join(sorted(wanted))}")
    for row in reader:
        at = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26]).timestamp()
        # The code trace has answers of no token; a request asks for one at least.
        yield TraceRow(at, int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"])))


def _jsonl(file: Iterable[str]) -> Iterator[TraceRow]:
    for line in file:
        if line.strip():
            row = json.loads(line)
            yield _FORMATS["hash_ids" in row](row)


def _mooncake(row: dict[str, Any]) -> TraceRow:
    blocks = tuple(int(block) for block in row["hash_ids"])
    needed = -(-int(row["input_length"]) // MOONCAKE_BLOCK)
    if len(blocks) != needed:
        raise ValueError(f"input_length needs {needed} hash_ids, there are {len(blocks)}")
    return TraceRow(
        float(row["timestamp"]) / 1e3, int(row["input_length"]), int(row["output_length"]), blocks
    )


def _plain(row: dict[str, Any]) -> TraceRow:
    at, output, text = (
        float(row.get("timestamp", 0.0)),
        int(row["output_tokens"]),
        row.get("prompt"),
    )
    if text is None:
        return TraceRow(at, int(row["input_tokens"]), output)
    if not isinstance(text, str) or not text:
        raise ValueError("prompt must be a text that is not empty")
    return TraceRow(at, len(text.split()) or 1, output, text=text)


_FORMATS: dict[bool, Callable[[dict[str, Any]], TraceRow]] = {True: _mooncake, False: _plain}
