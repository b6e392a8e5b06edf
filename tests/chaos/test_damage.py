"""One frame of a hand-off is damaged on its way: decode refuses it by a typed error, the prompt is
prefilled again for the same reservation, and the client gets the undisturbed text.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from baton.engine.transfer.payload import SequenceReader
from baton.engine.transfer.plan import FramePlan
from baton.engine.transfer.shm import ShmLink
from baton.engine.transfer.torch_dist import TorchLink
from baton.store import StoredModel
from baton.worker import kv_wire
from decode_service.reservations import Reservations
from prefill_service.inline import InlineLink
from prefill_service.push import PushSender
from tests.chaos.conftest import TRANSPORTS
from tests.support.cluster import COMPLETIONS, Cluster, running_cluster
from tests.support.fault_worker import FRAME_BYTES

pytestmark = [pytest.mark.slow, pytest.mark.brief]

BODY: dict[str, Any] = {
    "prompt": "All happy families are alike; each unhappy family is unhappy in its own way. " * 4,
    "max_tokens": 12,
    "ignore_eos": True,
    "temperature": 0,
    "logprobs": 0,
}
HEADERS: dict[str, Callable[[int], int]] = {
    "dropped": lambda number: number + (number >= 2),
    "repeated": lambda number: number - (number == 2),
    "reordered": lambda number: {1: 2, 2: 1}.get(number, number),
}
"""Fault → what the header of frame `number` says instead."""


@pytest.fixture(params=TRANSPORTS)
async def cluster(
    request: pytest.FixtureRequest, tiny_chat: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Cluster]:
    for link in (ShmLink, TorchLink, InlineLink):
        monkeypatch.setattr(link, "frame_bytes", FRAME_BYTES)
    async with running_cluster(tiny_chat, 2, 2, transport=request.param) as cluster:
        await cluster.learn_the_usual()
        yield cluster


def misnumber_one_handoff(monkeypatch: pytest.MonkeyPatch, lie: Callable[[int], int]) -> None:
    """All headers lie until the first sender gives up."""
    make, abort, lies = kv_wire._data, PushSender.abort, [lie]

    def lying(sequence: int, plan: FramePlan, checksum: int | None) -> Any:
        return make(lies[0](sequence) if lies else sequence, plan, checksum)

    async def repent(self: PushSender) -> None:
        lies.clear()
        await abort(self)

    monkeypatch.setattr(kv_wire, "_data", lying)
    monkeypatch.setattr(PushSender, "abort", repent)


def flip_one_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the third payload, after its checksum was made. Where decode reads prefill's memory
    itself there is no copy to spoil: the checksum is that of other bytes then."""
    read, checksum, number = SequenceReader.read, SequenceReader.checksum, iter(range(1_000_000))

    def flipping(self: SequenceReader, plan: FramePlan, out: Any) -> int | None:
        made = read(self, plan, out)
        if next(number) == 2:
            out[7] ^= 1
        return made

    def of_other_bytes(self: SequenceReader, plan: FramePlan) -> int | None:
        made = checksum(self, plan)
        return made ^ 1 if made is not None and next(number) == 2 else made

    monkeypatch.setattr(SequenceReader, "read", flipping)
    monkeypatch.setattr(SequenceReader, "checksum", of_other_bytes)


@pytest.mark.parametrize("fault", ["flipped", *HEADERS])
async def test_a_damaged_frame_costs_time_and_nothing_else(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    expected = await cluster.ask(COMPLETIONS, **BODY, cache_salt="undisturbed")
    before = await cluster.totals(cluster.decodes)
    reserve, reserved = Reservations.reserve, list[Any]()

    def counted(self: Reservations, *args: Any, **kwargs: Any) -> Any:
        reserved.append(reserve(self, *args, **kwargs))
        return reserved[-1]

    monkeypatch.setattr(Reservations, "reserve", counted)
    if fault == "flipped":
        flip_one_byte(monkeypatch)
    else:
        misnumber_one_handoff(monkeypatch, HEADERS[fault])
    answer = await cluster.ask(COMPLETIONS, **BODY, stream=True, cache_salt=fault)
    assert answer.texts == expected.texts and answer.tokens == expected.tokens
    assert answer.reasons == expected.reasons and answer.counts == expected.counts
    after = await cluster.totals(cluster.decodes)
    assert after.handoffs_failed - before.handoffs_failed == 1
    assert after.handoffs - before.handoffs == 1
    assert [r.next_generation for r in reserved] == [2], "one promise, filled at the second attempt"
    await cluster.assert_unharmed()
