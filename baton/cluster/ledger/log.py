"""Ledgers in a file of bounded size: JSON lines, or Parquet where its name ends in `.parquet`.

JSON lines rotate once: at most twice `max_bytes` on disk. Lines and rows are made and written on a
thread of the standard library's logging, behind a bounded queue; when the disk is slower than the
requests, they are dropped and counted, and nobody waits.
"""

import logging
import queue
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path

import orjson

from baton.cluster.errors import SettingsError
from baton.cluster.ledger.ledger import Ledger

QUEUE_LINES = 1024


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        ledger: Ledger = record.msg  # type: ignore[assignment]
        return orjson.dumps(ledger.as_json()).decode()


def _file(path: Path, max_bytes: int) -> logging.Handler:
    if path.suffix == ".parquet":
        from baton.cluster.ledger.parquet import ParquetFile  # an extra: not everybody has it

        return ParquetFile(path, max_bytes)
    lines = RotatingFileHandler(path, maxBytes=max_bytes, backupCount=1, encoding="utf-8")
    lines.setFormatter(_Line())
    return lines


class LedgerLog:
    def __init__(self, path: Path, max_bytes: int) -> None:
        try:
            file = _file(path, max_bytes)
        except OSError as error:
            raise SettingsError(
                f"--ledger-log {path} cannot be written: {error.strerror}."
            ) from error
        self.dropped = 0
        self._queue: queue.Queue[logging.LogRecord] = queue.Queue(QUEUE_LINES)
        self._file = file
        self._listener = QueueListener(self._queue, file)
        self._listener.start()
        self._handler = QueueHandler(self._queue)

    def write(self, ledger: Ledger) -> None:
        record = logging.LogRecord("ledger", logging.INFO, "", 0, ledger, None, None)
        try:
            self._handler.enqueue(record)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Writes what is queued."""
        self._listener.stop()
        self._file.close()
