"""Set-up of the standard `logging` for one process: a line for people, or JSON for machines.

Everything goes to stderr, one line per record (a traceback follows its line). Called once, in
`__main__`; nobody else configures handlers.
"""

import logging
import os
import sys
from contextvars import ContextVar

import orjson

_NOISY = ("httpx", "httpcore", "grpc", "asyncio")


current_request: ContextVar[str] = ContextVar("current_request", default="")
"""The request that the running task serves; JSON lines carry it."""


class _JsonFormatter(logging.Formatter):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": record.created,
            "level": record.levelname.lower(),
            "process": self._name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_request.get():
            fields["request_id"] = request_id
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(fields).decode()


def configure(level: str = "info", json: bool = False, name: str = "baton") -> None:
    """Replaces the root handlers; `name` is the process in JSON lines."""
    # gRPC reads it when first used; its INFO lines about a lost peer are not for people.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    handler = logging.StreamHandler(sys.stderr)
    if json:
        handler.setFormatter(_JsonFormatter(name))
    else:
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
        )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))
