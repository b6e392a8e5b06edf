"""Ledgers as a Parquet file: a row per request, its phases and misses as lists of structs.

A Parquet file can be read once its end is written. So rows go to FILE.part, which becomes FILE when
it is full or the router ends, and the FILE before it FILE.1: at most three files of `max_bytes`.
What a router that is killed had in FILE.part is lost; JSON lines lose nothing.
"""

import fcntl
import logging
import os
from pathlib import Path
from typing import Any

from baton.cluster.errors import SettingsError
from baton.cluster.ledger.ledger import Ledger

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise SettingsError(
        f"--ledger-log FILE.parquet needs the package of the extra 'parquet' ({error}); "
        "with another ending it is JSON lines."
    ) from error

ROWS = 256
_PHASE = pa.struct(
    {
        "name": pa.string(),
        "where": pa.string(),
        "start_ms": pa.float64(),
        "duration_ms": pa.float64(),
        "overlapped": pa.bool_(),
    }
)
_MISS = pa.struct(
    {
        "target": pa.string(),
        "target_ms": pa.float64(),
        "seen_ms": pa.float64(),
        "cause": pa.string(),
        "sufficient": pa.bool_(),
    }
)
_TRANSFER = pa.struct(
    {
        "total_ms": pa.float64(),
        "overlapped_ms": pa.float64(),
        "exposed_ms": pa.float64(),
        "bytes": pa.int64(),
        "blocks": pa.int64(),
        "transports": pa.list_(pa.string()),
    }
)
SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "answer_id": pa.string(),
        "endpoint": pa.string(),
        "model": pa.string(),
        "tenant": pa.string(),
        "status": pa.int32(),
        "started_at": pa.float64(),
        "stream": pa.bool_(),
        "n": pa.int32(),
        "prompt_tokens": pa.int64(),
        "cached_tokens": pa.int64(),
        "output_tokens": pa.int64(),
        "prefill": pa.list_(pa.string()),
        "decode": pa.list_(pa.string()),
        "attempts": pa.int32(),
        "ttft_target_ms": pa.float64(),
        "tpot_target_ms": pa.float64(),
        "total_ms": pa.float64(),
        "ttft_ms": pa.float64(),
        "tpot_ms": pa.float64(),
        "misses": pa.list_(_MISS),
        "phases": pa.list_(_PHASE),
        "transfer": _TRANSFER,
    }
)


class ParquetFile(logging.Handler):
    """The file at the end of a `LedgerLog`. Raises OSError when it cannot be written, or is being
    written by another router."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        super().__init__()
        self._path = path
        self._part = path.with_name(f"{path.name}.part")
        self._max_bytes = max_bytes
        self._rows: list[dict[str, Any]] = []
        self._open()

    def emit(self, record: logging.LogRecord) -> None:
        ledger: Ledger = record.msg  # type: ignore[assignment]
        whole = ledger.as_json()
        timing = whole["timing"]
        self._rows.append({**whole, "phases": timing["phases"], "transfer": timing["transfer"]})
        if len(self._rows) >= ROWS:
            self._write()
            if self._sink.tell() >= self._max_bytes:
                self._finish()
                self._open()

    def close(self) -> None:
        """Ends the file, if there is anything in it."""
        if not self._sink.closed:
            self._write()
            self._finish()
        super().close()

    def _open(self) -> None:
        self._sink = self._part.open("ab")
        try:
            fcntl.flock(self._sink, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another router may write here
        except OSError:
            self._sink.close()
            raise
        self._sink.truncate(0)
        self._writer = pq.ParquetWriter(self._sink, SCHEMA, compression="zstd")

    def _write(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, SCHEMA))
            self._rows = []

    def _finish(self) -> None:
        empty = self._sink.tell() <= len(b"PAR1")
        self._writer.close()
        self._sink.close()
        if empty:
            self._part.unlink()
            return
        if self._path.exists():
            os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))
        os.replace(self._part, self._path)
