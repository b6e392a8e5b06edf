"""KV bytes from block table to block table, beside what the machine can do at most.

Two processes on loopback: a prefill side with the real sender, a decode side with the real gRPC
service, receiver and reservations. The ceilings are measured in the same run, in turn with the
hand-offs: one memcpy for shm, a bare Gloo pair (4 MiB messages, three in flight) for gloo, a bare
grpc.aio stream of bytes (4 MiB messages) for grpc. As in a hand-off, every byte comes from a place
of its own and goes to one; `hot` is the Gloo pair out of three buffers into three, all in the
cache. `exchange` is an empty message and its answer by gRPC: no hand-off is quicker, since its last
frame and the commit must be answered. CPU time is that of both processes together: on few cores, it
is what both ends share.

`--link 10gbit` puts the decode side on a host of its own (`_link.py`) behind a cable of that rate.

    python bench/transfer.py [--quick] [--json FILE] [--no-model] [--link RATE]
"""

import asyncio
import statistics
import sys
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as ListOf
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from _common import Report, parser
from _link import LOOPBACK, rated_link
from _transfer_peer import (
    MIB,
    MOST,
    Cost,
    Peer,
    layout_of,
    memcpy,
    raw_gloo,
    raw_grpc,
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
from baton.worker.heap import keep_freed_memory
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

    async def hand_off(self, transport: str, checksum: bool, mib: int) -> Cost:
        """From the first frame to the acknowledged commit."""
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
        start = self.peer.now()
        await sender.send(FramePlan(0, layout.num_layers, tuple(range(num_blocks))))
        await sender.commit(FIRST)
        cost = self.peer.now().since(start)
        await sender.abort()
        async for _ in events:  # to its end, so that the blocks are free for the next one
            continue
        expected = "torch:gloo" if transport == "gloo" else transport
        if sender.transport != expected:
            raise RuntimeError(f"{transport} fell back to {sender.transport}")
        return cost

    async def close(self) -> None:
        for pairs in self.pairs.values():
            await pairs.close()
        await self.channels.close()


async def in_turn(runs: dict[str, Callable[[], Awaitable[Cost]]], rounds: int) -> dict[str, Cost]:
    """Median wall time and mean CPU time of each, after one round to warm up."""
    costs: dict[str, list[Cost]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            cost = await run()
            if number:
                costs[name].append(cost)
    return {
        name: Cost(statistics.median(c.wall for c in each), statistics.mean(c.cpu for c in each))
        for name, each in costs.items()
    }


async def measure(report: Report, peer: Peer, quick: bool, transports: ListOf[str]) -> None:
    sizes = SIZES_MIB[:2] if quick else SIZES_MIB
    sender = Sender.open(peer, max(sizes) * MIB // layout_of().bytes_per_block + 1)
    target = torch.ones(MOST, dtype=torch.uint8)
    for mib in sizes:
        rounds = 3 if quick else {1: 30, 16: 10}.get(mib, 5)
        runs: dict[str, Callable[[], Awaitable[Cost]]] = {
            "shm ceiling": lambda mib=mib: memcpy(peer, target, mib),
            "gloo ceiling": lambda mib=mib: raw_gloo(peer, mib),
            "gloo hot": lambda mib=mib: raw_gloo(peer, mib, hot=True),
            "grpc ceiling": lambda mib=mib: raw_grpc(peer, sender.channels, mib),
            "exchange": lambda: raw_grpc(peer, sender.channels, 0),
        }
        for name in transports:
            for checksum in (True, False):
                runs[f"{name} {checksum}"] = lambda n=name, c=checksum, m=mib: sender.hand_off(
                    n, c, m
                )
        _report(report, mib, await in_turn(runs, rounds), transports)
    await sender.close()


def _report(report: Report, mib: int, costs: dict[str, Cost], transports: ListOf[str]) -> None:
    rates = {name: mib * MIB / 1e9 / cost.wall for name, cost in costs.items()}
    for name in transports:
        path, ceiling = f"transfer.{name}.{mib}MiB", rates[f"{name} ceiling"]
        with_sum, without = rates[f"{name} True"], rates[f"{name} False"]
        report.add(f"{path}.gb_s", with_sum, "GB/s")
        report.add(f"{path}.ceiling_share", with_sum / ceiling, "of ceiling")
        report.add(f"{path}.gb_s_without_checksum", without, "GB/s")
        report.add(f"{path}.ceiling_share_without_checksum", without / ceiling, "of ceiling")
        report.add(f"{path}.ceiling_gb_s", ceiling, "GB/s")
        report.add(f"{path}.checksum_share", 1 - with_sum / without, "of time")
        for run, of in (("True", ""), ("False", "_without_checksum"), ("ceiling", "_of_ceiling")):
            report.add(f"{path}.cpu_ms{of}", 1e3 * costs[f"{name} {run}"].cpu, "ms")
    report.add(f"transfer.gloo.{mib}MiB.hot_ceiling_gb_s", rates["gloo hot"], "GB/s")
    report.add(f"transfer.exchange.{mib}MiB.ms", 1e3 * costs["exchange"].wall, "ms")


def main() -> int:
    arguments = parser(str(__doc__).splitlines()[0])
    arguments.add_argument("--no-model", action="store_true", help="skip the real model's overlap")
    arguments.add_argument("--link", metavar="RATE", help="of a cable between the two, as in tc")
    args: Any = arguments.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    report = Report(f"KV transfer over {args.link}" if args.link else "KV transfer")
    transports = ("gloo", "grpc") if args.link else tuple(TRANSPORTS)
    with (
        rated_link(args.link) if args.link else nullcontext(LOOPBACK) as link,
        running_peer(link) as peer,
    ):
        asyncio.run(measure(report, peer, args.quick, transports))
    if not (args.no_model or args.link):
        from _transfer_exposed import exposed_shares

        shares = exposed_shares(2048, rounds=2 if args.quick else 5)
        report.add("transfer.exposed_share.2048", max(shares["shm"], shares["gloo"]), "of TTFT")
        for transport, share in shares.items():
            report.add(f"transfer.exposed_share.2048.{transport}", share, "of TTFT")
    report.finish(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
