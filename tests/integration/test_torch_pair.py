"""Two processes and one torch group, the backend being a string."""

import asyncio
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from baton.engine.transfer.base import HandoffRefused
from baton.engine.transfer.pair_group import RECEIVER, SENDER, PairGroup

RANK = """
import asyncio, sys
import torch, torch.distributed as dist
from baton.engine.transfer.pair_group import PairGroup
async def main(rank, port, backend):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    group = await PairGroup.open(store, "pair", rank, backend, 4096, "127.0.0.1", 30.0)
    for count, size in ((1, 1), (7, 4096), (3, 100)):
        lane, tag = await group.take(), group.next_tag(count)
        if rank == 0:
            fills = [lambda room, n=n: room[:size].fill_((size + n) % 251) for n in range(count)]
            await group.start(lambda: group.send(lane, tag, fills))
        else:
            came = []
            take = lambda number, message: came.append((number, set(message.tolist())))
            await group.start(lambda: group.receive(lane, tag, [size] * count, take))
            assert came == [(n, {(size + n) % 251}) for n in range(count)]
        group.give(lane)
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


async def test_what_is_refused_midway_is_received_to_its_end_and_the_next_frame_passes() -> None:
    store = dist.HashStore()
    sender, receiver = await asyncio.gather(
        *(
            PairGroup.open(store, "pair", rank, "gloo", 64, "127.0.0.1", 30.0)
            for rank in (SENDER, RECEIVER)
        )
    )

    async def pass_one(refused: int | None) -> list[int]:
        lanes, came = [await end.take() for end in (sender, receiver)], []
        fills = [lambda room, n=n: room.fill_(n) for n in range(5)]

        def take(number: int, message: torch.Tensor) -> None:
            if number == refused:
                raise HandoffRefused("not wanted any more")
            came.append(int(message[0]))

        tags = [end.next_tag(5) for end in (sender, receiver)]
        works = (
            sender.start(lambda: sender.send(lanes[0], tags[0], fills)),
            receiver.start(lambda: receiver.receive(lanes[1], tags[1], [72] * 5, take)),
        )
        _, received = await asyncio.gather(*works, return_exceptions=True)
        assert isinstance(received, HandoffRefused) == (refused is not None)
        for end, lane in zip((sender, receiver), lanes, strict=True):
            end.give(lane)
        return came

    assert await pass_one(refused=1) == [0]
    assert await pass_one(refused=None) == [0, 1, 2, 3, 4]
    assert not sender.ended.is_set() and not receiver.ended.is_set()
    sender.close()
    receiver.close()
