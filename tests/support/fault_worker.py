"""`python -m tests.support.fault_worker prefill|decode --flags`: a real worker that reports.

The worker is the product's own process. At the points where a fault matters it says so on the
test's socket and waits for leave to go on; what happens meanwhile is the test's business.
Frames are small, so that short prompts have many. See `fault_points`.
"""

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

SOCKET = "FAULT_POINTS"
NAME = "FAULT_POINTS_NAME"
FRAME_BYTES = 8192
"""Two blocks of the tiny model."""


def reach(point: str) -> None:
    """Blocks the calling thread until the test answers."""
    with socket.socket(socket.AF_UNIX) as talk:
        talk.connect(os.environ[SOCKET])
        talk.sendall(f"{os.environ[NAME]} {point}\n".encode())
        talk.recv(1)


def before(owner: Any, name: str, point: str) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def reported(*args: Any, **kwargs: Any) -> Any:
        reach(point)
        return original(*args, **kwargs)

    setattr(owner, name, reported)


def report_prefill() -> None:
    from baton.engine.transfer.shm import ShmLink
    from baton.engine.transfer.torch_dist import TorchLink
    from prefill_service import torch_pair
    from prefill_service.inline import InlineLink
    from prefill_service.push import PushSender

    for link in (ShmLink, TorchLink, InlineLink):
        link.frame_bytes = FRAME_BYTES
    torch_pair.MESSAGE_BYTES = FRAME_BYTES // 2
    before(PushSender, "send", "prefill.frame")
    before(PushSender, "commit", "prefill.commit")


def report_decode() -> None:
    from baton.engine.engine import Engine
    from decode_service.incoming import IncomingHandoff
    from decode_service.reservations import Reservations

    before(Reservations, "reserve", "decode.reserve")
    before(IncomingHandoff, "expect", "decode.frame")
    before(IncomingHandoff, "commit", "decode.commit")
    step = Engine.step

    def reported(self: Any) -> Any:
        outputs = step(self)
        if outputs:
            reach("decode.step")
        return outputs

    Engine.step = reported  # type: ignore[method-assign]


def run(role: str, argv: list[str]) -> int:
    from baton.cluster.settings import DecodeSettings, PrefillSettings, load_or_exit

    if role == "prefill":
        from prefill_service.__main__ import main as prefill

        report_prefill()
        return prefill(load_or_exit(PrefillSettings, argv, "prefill_service"))
    from decode_service.__main__ import main as decode

    report_decode()
    return decode(load_or_exit(DecodeSettings, argv, "decode_service"))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
