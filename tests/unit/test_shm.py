"""Memory that two processes share: who may map it, and when it is gone."""

import asyncio
import dataclasses
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from baton.engine.transfer.base import ShmBlocks, TransportFailed
from baton.engine.transfer.shm import SharedMemory, SharedPools, host_id
from tests.support.handoffs import until

SENDER = """
import time
from baton.engine.transfer.shm import SharedMemory
memory = SharedMemory(4096)
memory.bytes[100:200].fill_(7)
name = memory.name(4, (1,))
print(name.pid, name.fd, name.token.hex(), flush=True)
time.sleep(60)
"""


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:baton-kv")


async def test_a_receiver_sees_the_memory_and_its_mapping_goes_when_the_sender_is_killed() -> None:
    before = mapped()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SENDER, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    pid, fd, token = (await process.stdout.readline()).decode().split()
    pools, name = SharedPools(), ShmBlocks(int(pid), int(fd), bytes.fromhex(token), 4, (1,))
    seen = pools.find(name)
    assert (seen.num_blocks, seen.blocks) == (4, (1,))
    assert seen.memory[99:201].tolist() == [0] + [7] * 100 + [0]
    del seen
    assert len(pools) == 1 and mapped() == before + 1
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await until(lambda: len(pools) == 0)
    assert mapped() == before
    with pytest.raises(TransportFailed):
        pools.find(name)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token": bytes(16)}, "token"),
        ({"token": b""}, "token"),
        ({"fd": 0}, "process"),
        ({"fd": 9999}, "No such file"),
        ({"pid": 2**22 + 5}, "not here"),
    ],
)
async def test_a_wrong_process_or_token_is_refused(change: dict, reason: str) -> None:
    memory, pools = SharedMemory(4096), SharedPools()
    good = memory.name(2, (0,))
    with pytest.raises(TransportFailed, match=reason):
        pools.find(dataclasses.replace(good, **change))
    assert pools.find(good).memory.nbytes == 4096
    pools.close()
    memory.close()


async def test_the_memory_cannot_be_written_or_shortened_by_others() -> None:
    memory, pools = SharedMemory(4096), SharedPools()
    name = memory.name(2, (0,))
    with pytest.raises(ValueError, match="read-only"):
        pools.find(name).memory[0] = 1
    path = f"/proc/{name.pid}/fd/{name.fd}"
    with pytest.raises(PermissionError):
        os.truncate(path, 0)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    pools.close()
    memory.close()


async def test_mappings_are_bounded_and_the_oldest_goes_first() -> None:
    memories, pools = [SharedMemory(4096) for _ in range(4)], SharedPools(limit=2)
    for memory in memories:
        pools.find(memory.name(1, (0,)))
        assert pools.num_bytes <= 2 * 4096
    assert len(pools) == 2
    pools.close()
    for memory in memories:
        memory.close()


async def test_closed_memory_cannot_be_mapped_and_is_gone_with_its_last_user() -> None:
    before = mapped()
    memory, pools = SharedMemory(4096), SharedPools()
    name, kept = memory.name(1, (0,)), memory.bytes[:10]
    memory.close()
    with pytest.raises(TransportFailed):
        pools.find(name)
    kept.fill_(1)
    del memory, kept
    assert mapped() == before


def test_processes_of_one_machine_and_user_have_the_same_host_id() -> None:
    command = [sys.executable, "-c", "from baton.engine.transfer.shm import *; print(host_id())"]
    other = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert other.stdout.strip() == host_id()
