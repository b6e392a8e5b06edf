"""How much may be on its way inside messages: to one decode worker, and to all of them."""

import asyncio

import pytest

from baton.engine.kv_cache import KVCache
from baton.engine.kv_layout import KVLayout
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import Sequence
from baton.engine.transfer.base import Shipment, TransportFailed
from baton.engine.transfer.payload import SequenceReader
from baton.engine.transfer.plan import FramePlan
from prefill_service.inline import InlineLink


async def load(link: InlineLink, times: int = 1) -> list[Shipment]:
    seq = Sequence([1], SamplingParams())
    seq.block_table = [0]
    reader = SequenceReader(KVCache(KVLayout("f", 1, 1, 8, 4, "bfloat16", ("full",)), 1), seq)
    return [await link.load(reader, FramePlan(0, 1, (0,)), number) for number in range(times)]


async def test_a_decode_worker_that_acknowledges_nothing_leaves_others_their_room() -> None:
    """Hand-offs to one slow worker could take all the room that there was."""
    all_pairs = asyncio.Semaphore(3)
    slow, other = (InlineLink(all_pairs, 2, 0.05) for _ in range(2))
    (first, _) = await load(slow, 2)
    with pytest.raises(TransportFailed, match="no room in flight"):
        await load(slow)
    await load(other)
    with pytest.raises(TransportFailed, match="no room in flight"):
        await load(other)  # there is room in its pair, and none in all
    first.release()
    (again,) = await load(other)
    again.release()
    await load(slow)
