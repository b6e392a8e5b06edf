"""A prefill and a decode worker with a chosen transport between them."""

import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.engine.llm import LLM
from baton.engine.sampling_params import SamplingParams
from baton.engine.transfer.shm import ShmLink
from baton.engine.transfer.torch_dist import TorchLink
from prefill_service import torch_pair
from prefill_service.inline import InlineLink
from tests.support.client import PairClient, Served
from tests.support.handoffs import until
from tests.support.tiny import VOCAB, RunningWorker, run_decode, run_prefill

NAMES = {"shm": "shm", "torch": "torch:gloo", "grpc": "grpc"}
SMALL_FRAME = 2048
"""Two blocks of the tiny model."""
SMALL_MESSAGE = 1024


class Pair:
    def __init__(self, prefill: RunningWorker, decode: RunningWorker, client: PairClient) -> None:
        self.prefill, self.decode, self.client = prefill, decode, client

    async def settle(self) -> None:
        """Blocks and buffers are back where they were."""
        await self.prefill.wait_idle()
        await self.decode.wait_idle()
        pairs, inbox = self.prefill.transfer, self.decode.transfer
        await until(lambda: pairs.inline_frames._value == 8)
        for end in (pairs, inbox):
            await until(lambda e=end: not e.resources().in_flight_bytes)
        groups = [p.torch.group for p in pairs._pairs.values() if p.torch.group]
        for group in [*groups, *inbox.groups._connected()]:
            await until(lambda g=group: g.ended.is_set() or g._lanes.qsize() == g.depth)


@contextlib.asynccontextmanager
async def run_pair(
    tiny_llama: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pair]:
    """With frames so small that every prompt has several, and several messages in each."""
    for link in (ShmLink, InlineLink, TorchLink):
        monkeypatch.setattr(link, "frame_bytes", SMALL_FRAME)
    monkeypatch.setattr(torch_pair, "MESSAGE_BYTES", SMALL_MESSAGE)
    timing = {"transport_timeout_s": 1.0, "transport_retry_s": 3.0}
    async with (
        run_prefill(tiny_llama, transport=transport, **timing) as prefill,
        run_decode(tiny_llama, transport=transport, transport_timeout_s=1.0) as decode,
        PairClient(prefill, decode) as client,
    ):
        yield Pair(prefill, decode, client)


def offline(llm: LLM, prompt: list[int], **sampling: Any) -> list[list[int]]:
    params: dict[str, Any] = {"temperature": 0.0, "seed": 1, **sampling}
    (choices,) = llm.generate([prompt], SamplingParams(**params))
    return [choice.token_ids for choice in choices]


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def transport_of(served: Served) -> str:
    assert served.prefill_done is not None
    return served.prefill_done.transport
