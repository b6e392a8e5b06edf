"""KV bytes from block table to block table, beside what the machine can do at most.

Two processes on loopback: a prefill side with the real sender, a decode side with the real gRPC
service, receiver and reservations. The ceilings are measured in the same run, in turn with the
hand-offs: one memcpy for shm, a bare Gloo pair (4 MiB messages, three in flight) for gloo, a bare
grpc.aio stream of bytes (4 MiB messages) for grpc.

    python bench/transfer.py [--quick] [--json FILE] [--no-model]
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import torch
from _common import Report, parser
from _transfer_peer import (
    MIB,
    Peer,
    layout_of,
    memcpy_s,
    raw_gloo_s,
    raw_grpc_s,
    running_peer,
)

from baton.cluster.rpc import ChannelPool
from baton.cluster.settings import PrefillSettings
from baton.engine.kv_cache import KVCache
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import SampledToken, Sequence
from baton.engine.transfer.base import FirstToken
from baton.engine.transfer.plan import FramePlan
from baton.engine.transfer.shm import SharedMemory
from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from prefill_service.pairs import Pairs

SIZES_MIB = (1, 16, 256)
TRANSPORTS = {"shm": "shm", "gloo": "torch", "grpc": "grpc"}
FIRST = (FirstToken(0, SampledToken(7), 0),)


@dataclass
class Sender:
    """The prefill side: one pool, one `Pairs` per transport and checksum switch."""

    cache: KVCache
    channels: ChannelPool
    peer: Peer
    pairs: dict[tuple[str, bool], Pairs]

    @staticmethod
    def open(peer: Peer, num_blocks: int) -> "Sender":
        memory = SharedMemory(num_blocks * layout_of().bytes_per_block)
        cache = KVCache(layout_of(), num_blocks, memory=memory.bytes)
        cache.data.view(torch.int16).fill_(0x3C3C)
        channels, pairs = ChannelPool(), {}
        for name, transport in TRANSPORTS.items():
            for checksum in (True, False):
                settings = PrefillSettings.build(transport=transport, kv_checksum=checksum)
                pairs[name, checksum] = Pairs(settings, cache, channels, memory)
        return Sender(cache, channels, peer, pairs)

    async def hand_off(self, transport: str, checksum: bool, mib: int) -> float:
        """Seconds from the first frame to the acknowledged commit."""
        layout = self.cache.layout
        num_blocks = mib * MIB // layout.bytes_per_block
        prompt = [3] * (num_blocks * layout.block_size)
        decode = decode_pb2_grpc.DecodeStub(self.channels.get(self.peer.address))
        request = decode_pb2.GenerateRequest(
            request_id="bench",
            prompt_token_ids=prompt,
            sampling=common_pb2.SamplingParams(top_p=1, repetition_penalty=1, n=1, max_tokens=2),
        )
        events = aiter(decode.Generate(request))
        reservation = (await anext(events)).reserved.reservation
        seq = Sequence(prompt, SamplingParams())
        seq.block_table = list(range(num_blocks))
        sender = self.pairs[transport, checksum].sender(reservation, seq)
        sender.open()
        start = time.perf_counter()
        await sender.send(FramePlan(0, layout.num_layers, tuple(range(num_blocks))))
        await sender.commit(FIRST)
        seconds = time.perf_counter() - start
        await sender.abort()
        async for _ in events:  # to its end, so that the blocks are free for the next one
            continue
        expected = "torch:gloo" if transport == "gloo" else transport
        if sender.transport != expected:
            raise RuntimeError(f"{transport} fell back to {sender.transport}")
        return seconds

    async def close(self) -> None:
        for pairs in self.pairs.values():
            await pairs.close()
        await self.channels.close()


async def in_turn(runs: dict[str, Callable[[], Awaitable[float]]], rounds: int) -> dict[str, float]:
    """Median seconds of each, after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            taken = await run()
            if number:
                seconds[name].append(taken)
    return {name: statistics.median(values) for name, values in seconds.items()}


async def measure(report: Report, peer: Peer, quick: bool) -> None:
    sizes = SIZES_MIB[:2] if quick else SIZES_MIB
    sender = Sender.open(peer, max(sizes) * MIB // layout_of().bytes_per_block + 1)
    shares: list[float] = []
    for mib in sizes:
        rounds = 3 if quick else {1: 30, 16: 10}.get(mib, 5)
        runs: dict[str, Callable[[], Awaitable[float]]] = {
            "shm ceiling": lambda mib=mib: asyncio.to_thread(memcpy_s, mib),
            "gloo ceiling": lambda mib=mib: raw_gloo_s(peer, mib),
            "grpc ceiling": lambda mib=mib: raw_grpc_s(peer, sender.channels, mib),
        }
        for name in TRANSPORTS:
            for checksum in (True, False):
                runs[f"{name} {checksum}"] = lambda n=name, c=checksum, m=mib: sender.hand_off(
                    n, c, m
                )
        seconds = await in_turn(runs, rounds)
        _report(report, mib, seconds)
        shares.append(1 - seconds["grpc False"] / seconds["grpc True"])
    report.add("transfer.checksum_share", max(shares[-1], 0.0), "of grpc's time")
    await sender.close()


def _report(report: Report, mib: int, seconds: dict[str, float]) -> None:
    for name in TRANSPORTS:
        ceiling = mib * MIB / 1e9 / seconds[f"{name} ceiling"]
        path = f"transfer.{name}.{mib}MiB"
        with_sum, without = (mib * MIB / 1e9 / seconds[f"{name} {c}"] for c in (True, False))
        report.add(f"{path}.gb_s", with_sum, "GB/s")
        report.add(f"{path}.ceiling_share", with_sum / ceiling, "of ceiling")
        report.add(f"{path}.gb_s_without_checksum", without, "GB/s")
        report.add(f"{path}.ceiling_share_without_checksum", without / ceiling, "of ceiling")
        report.add(f"{path}.ceiling_gb_s", ceiling, "GB/s")


def main() -> int:
    arguments = parser(str(__doc__).splitlines()[0])
    arguments.add_argument("--no-model", action="store_true", help="skip the real model's overlap")
    args: Any = arguments.parse_args()
    torch.set_num_threads(1)
    report = Report("KV transfer")
    with running_peer() as peer:
        asyncio.run(measure(report, peer, args.quick))
    if not args.no_model:
        from _transfer_exposed import exposed_shares

        shares = exposed_shares(2048, rounds=2 if args.quick else 5)
        report.add("transfer.exposed_share.2048", max(shares["shm"], shares["gloo"]), "of TTFT")
        for transport, share in shares.items():
            report.add(f"transfer.exposed_share.2048.{transport}", share, "of TTFT")
    report.finish(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
