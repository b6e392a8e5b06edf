"""A router whose ledger can be switched while it serves.

    python bench/_switched_router.py SHARE FLAGS     SHARE of a core for timelines, router's flags

SIGUSR1: as if the ledger had never been written, nothing is noted and nothing folded. SIGUSR2:
with it again.
"""

import contextlib
import signal
import sys
from functools import partial
from typing import Any

from _common import Report  # first: it makes way for the router's package

import router.calls
import router.conductor
import router.ledgers
import router.openai.endpoint
from baton.cluster.ledger import Trail
from baton.cluster.reports import Collector
from baton.cluster.settings import RouterSettings, load_or_exit
from router.__main__ import main
from router.ledgers import Ledgers

__all__ = ["Report"]
_UNTIMED = contextlib.nullcontext()


def _nothing(*_: object, **__: object) -> None:
    return None


def _untimed(*_: object) -> contextlib.nullcontext[None]:
    return _UNTIMED


PARTS: list[tuple[Any, str, Any]] = [
    (router.calls, "note", _nothing),
    (router.conductor, "timed", _untimed),
    (router.openai.endpoint, "timed", _untimed),
    (Trail, "delivered", _nothing),
    (Trail, "span", _nothing),
    (Ledgers, "add", _nothing),
]
WITH = [(owner, name, getattr(owner, name)) for owner, name, _ in PARTS]


def _switch(parts: list[tuple[Any, str, Any]]) -> None:
    for owner, name, part in parts:
        setattr(owner, name, part)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: _switch(PARTS))
    signal.signal(signal.SIGUSR2, lambda *_: _switch(WITH))
    router.ledgers.Collector = partial(Collector, share=float(sys.argv[1]))  # type: ignore[misc]
    sys.exit(main(load_or_exit(RouterSettings, sys.argv[2:], "router")))
