"""Two processes and one torch group, the backend being a string."""

import asyncio
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

RANK = """
import asyncio, sys
import torch, torch.distributed as dist
from baton.engine.transfer.torch_dist import PairGroup
async def main(rank, port, backend):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    group = await PairGroup.open(store, "pair", rank, backend, 4096, "127.0.0.1", 30.0)
    for size in (1, 4096, 100):
        buffer = await group.take()
        buffer.fill_(size % 251 if rank == 0 else 0)
        room = buffer[:size] if rank == 0 or backend == "nccl" else buffer
        verb, tag = group.send if rank == 0 else group.receive, group.next_tag()
        await group.start(lambda: verb(room, tag))
        assert bool((buffer[:size] == size % 251).all())
        group.give(buffer)
    group.close()
    print("done")
asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
"""


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
async def test_messages_of_any_size_arrive_whole(backend: str) -> None:
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU for each of the two processes")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", RANK, str(rank), str(store.port), backend),
            stdout=subprocess.PIPE,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(rank)},
        )
        for rank in (0, 1)
    ]
    outputs = await asyncio.gather(*(process.communicate() for process in processes))
    assert [out.strip() for out, _ in outputs] == [b"done", b"done"]
