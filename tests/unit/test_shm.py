"""Memory that two processes share: who may map it, and when it is gone."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baton.engine.transfer.base import ShmSlot, TransportFailed
from baton.engine.transfer.shm import ShmLink, SlotMaps, SlotPool, host_id
from tests.support.handoffs import until, whole_block

SENDER = """
import time
from baton.engine.transfer.shm import SlotPool
pool = SlotPool(4096, 2)
pool.tensor(1, 100).fill_(7)
slot = pool.name(1, 100)
print(slot.pid, slot.fd, slot.token.hex(), slot.offset, slot.size, flush=True)
time.sleep(60)
"""


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:baton-kv")


async def test_a_receiver_sees_the_slot_and_its_mapping_goes_when_the_sender_is_killed() -> None:
    before = mapped()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SENDER, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    words = (await process.stdout.readline()).decode().split()
    pid, fd, offset, size = (int(words[i]) for i in (0, 1, 3, 4))
    maps, slot = SlotMaps(), ShmSlot(pid, fd, bytes.fromhex(words[2]), offset, size)
    assert bytes(maps.view(slot)) == b"\7" * 100
    assert len(maps) == 1 and mapped() == before + 1
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await until(lambda: len(maps) == 0)
    assert mapped() == before
    with pytest.raises(TransportFailed):
        maps.view(slot)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token": bytes(16)}, "token"),
        ({"token": b""}, "token"),
        ({"fd": 0}, "process"),
        ({"fd": 9999}, "No such file"),
        ({"pid": 2**22 + 5}, "not here"),
        ({"offset": 0}, "outside"),
        ({"offset": 4096 * 3 - 1, "size": 2}, "outside"),
        ({"size": 2**40}, "outside"),
    ],
)
async def test_a_wrong_process_token_or_range_is_refused(change: dict, reason: str) -> None:
    pool, maps = SlotPool(4096, 2), SlotMaps()
    good = pool.name(0, 10)
    with pytest.raises(TransportFailed, match=reason):
        maps.view(dataclasses.replace(good, **change))
    assert len(maps.view(good)) == 10
    maps.close()
    pool.close()


async def test_the_memory_cannot_be_written_or_shortened_by_others() -> None:
    pool, maps = SlotPool(4096, 2), SlotMaps()
    slot = pool.name(0, 10)
    with pytest.raises(TypeError):
        maps.view(slot)[0] = 1
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/{slot.pid}/fd/{slot.fd}", 0)
    maps.close()
    pool.close()


async def test_mappings_are_bounded_and_the_oldest_goes_first() -> None:
    pools, maps = [SlotPool(4096, 1) for _ in range(4)], SlotMaps(limit=2)
    for pool in pools:
        maps.view(pool.name(0, 1))
        assert maps.num_bytes <= 2 * pool.size
    assert len(maps) == 2
    maps.close()
    for pool in pools:
        pool.close()


class Reader:
    """Payloads of a given size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def num_bytes(self, plan: object) -> int:
        return self.size

    def read(self, plan: object, out: torch.Tensor) -> int | None:
        out.fill_(1)
        return None


async def test_slots_are_waited_for_with_a_deadline_and_come_back_when_released() -> None:
    pool = SlotPool(4096, 2)
    link, plan = ShmLink(pool, 0.05), whole_block(0)
    shipments = [await link.load(Reader(4096), plan) for _ in range(2)]
    with pytest.raises(TransportFailed, match=r"0\.05 s"):
        await link.load(Reader(1), plan)
    with pytest.raises(TransportFailed, match="4097 bytes"):
        await link.load(Reader(4097), plan)
    for shipment in shipments:
        shipment.release()
    assert pool.num_free == 2
    pool.close()


async def test_a_cancelled_load_gives_its_slot_back() -> None:
    pool = SlotPool(4096, 2)
    loading = asyncio.create_task(ShmLink(pool, 1.0).load(Reader(100), whole_block(0)))
    await asyncio.sleep(0)
    loading.cancel()
    await asyncio.wait({loading})
    await until(lambda: pool.num_free == 2)
    pool.close()


def test_processes_of_one_machine_and_user_have_the_same_host_id() -> None:
    command = [sys.executable, "-c", "from baton.engine.transfer.shm import *; print(host_id())"]
    other = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert other.stdout.strip() == host_id()
