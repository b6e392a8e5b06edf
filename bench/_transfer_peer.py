"""The other process of the transfer benchmark: a decode worker without a model, and bare
receivers for the ceilings."""

import asyncio
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import grpc
import psutil
import torch
import torch.distributed as dist
from _link import LOOPBACK, Link, enter

from baton.cluster.rpc import ChannelPool, make_server
from baton.cluster.settings import DecodeSettings
from baton.engine.async_engine import AsyncEngine
from baton.engine.block_manager import BlockManager
from baton.engine.config import EngineConfig
from baton.engine.decode_scheduler import DecodeScheduler
from baton.engine.engine import Engine
from baton.engine.kv_cache import KVCache
from baton.engine.kv_layout import KVLayout
from baton.engine.sampler import Sampler
from baton.engine.transfer.pair_group import gloo
from baton.v1 import decode_pb2_grpc
from baton.worker.activity import Activity
from baton.worker.heap import keep_freed_memory
from baton.worker.replies import ReplyStreams
from decode_service.inbox import Inbox
from decode_service.server import DecodeServicer
from decode_service.transfer import KVTransferServicer
from decode_service.worker import DecodeWorker

MIB = 1 << 20
MESSAGE = 4 * MIB
IN_FLIGHT = 3
MOST = 256 * MIB
VOCAB = 100


def layout_of() -> KVLayout:
    """32 layers of 8 heads of 64 in bf16, 16 tokens a block: 1 MiB per block."""
    return KVLayout("bench", 32, 8, 64, 16, "bfloat16", ("full",) * 32)


class Cost(NamedTuple):
    """Seconds on the clock, and of CPU in both processes."""

    wall: float
    cpu: float

    def since(self, start: "Cost") -> "Cost":
        return Cost(self.wall - start.wall, self.cpu - start.cpu)


@dataclass
class Peer:
    address: str
    process: psutil.Process
    gloo: Any
    _store: Any
    memory: torch.Tensor
    """What the bare messages say."""
    messages: list[bytes]

    def now(self) -> Cost:
        times = [process.cpu_times() for process in (psutil.Process(), self.process)]
        return Cost(time.perf_counter(), sum(each.user + each.system for each in times))


class _NoModel:
    """Logits that always choose token 1."""

    def run(self, batch: Any) -> torch.Tensor:
        rows = sum(item.samples for item in batch.items)
        return torch.nn.functional.one_hot(torch.ones(rows, dtype=torch.long), VOCAB).float()


def _decode_process(ready: Any, link: Link) -> None:
    enter(link)
    torch.set_num_threads(1)
    keep_freed_memory()
    asyncio.run(_decode(ready, link))


async def _decode(ready: Any, link: Link) -> None:
    settings = DecodeSettings.build(transport="auto", host=link.theirs)
    cache = KVCache(layout_of(), 320)
    cache.data.fill_(0)
    config = EngineConfig(
        num_blocks=320,
        block_size=16,
        max_num_seqs=8,
        max_model_len=320 * 16,
        chunk_size=512,
        max_queue=8,
        eos_token_ids=frozenset({2}),
        fingerprint="bench",
    )
    blocks = BlockManager(320, 16, enable_prefix_cache=False)
    scheduler = DecodeScheduler(config, blocks)
    engine = Engine(scheduler, blocks, _NoModel(), Sampler(config.eos_token_ids))
    address, server = await serve_decode(settings, engine, cache, VOCAB)
    store = dist.TCPStore(link.theirs, 0, is_master=True, wait_for_workers=False)
    ready.send((address, store.port))
    group = await asyncio.to_thread(gloo, store, 1, timedelta(seconds=60), link.theirs)
    await asyncio.to_thread(_serve_raw_gloo, group)
    await server.stop(0)


async def serve_decode(
    settings: DecodeSettings, engine: Engine, cache: KVCache, vocab_size: int
) -> tuple[str, grpc.aio.Server]:
    """Starts the decode service around an engine, without a registry; it runs while the server
    is kept."""
    running = AsyncEngine(engine)
    worker, inbox = DecodeWorker(running, cache, Activity(), 30.0), Inbox(settings, cache.layout)
    status = SimpleNamespace(incarnation="bench", address="")
    decode = DecodeServicer(worker, status, vocab_size, inbox, ReplyStreams())  # type: ignore[arg-type]
    transfer = KVTransferServicer(worker, inbox, cache.layout, "bench", 30.0)
    add_decode = partial(decode_pb2_grpc.add_DecodeServicer_to_server, decode)
    server, port = await make_server(
        [add_decode, transfer.add_to, _add_raw_grpc], f"{settings.host}:0", []
    )
    status.address = f"{settings.host}:{port}"
    running.start()
    await server.start()
    return status.address, server


def _serve_raw_gloo(group: Any) -> None:
    """Each round: the number of messages, the messages, an answer."""
    order, memory = torch.zeros(2, dtype=torch.int64), _memory()
    while True:
        group.recv([order], 0, 0).wait(timedelta(hours=1))
        _pump(group.recv, 0, memory, order.tolist())
        group.send([order], 0, 0).wait()


def _memory() -> torch.Tensor:
    return torch.zeros(MOST, dtype=torch.uint8)


def _pump(verb: Any, peer: int, memory: torch.Tensor, order: list[int]) -> None:
    """`order`: the number of messages, and how many of them lie side by side: the next one uses
    the first one's memory again."""
    count, apart = order
    works: list[Any] = []
    for number in range(count):
        start = number % apart * MESSAGE
        works.append(verb([memory[start : start + MESSAGE]], peer, 1 + number))
        if len(works) == IN_FLIGHT:
            works.pop(0).wait()
    for work in works:
        work.wait()


def _add_raw_grpc(server: grpc.aio.Server) -> None:
    async def push(messages: AsyncIterator[bytes], context: Any) -> bytes:
        return str(sum([len(message) async for message in messages])).encode()

    handler = grpc.stream_unary_rpc_method_handler(push)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("raw", {"Push": handler}),)
    )


@contextmanager
def running_peer(link: Link = LOOPBACK) -> Iterator[Peer]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_decode_process, args=(theirs, link), daemon=True)
    process.start()
    theirs.close()
    try:
        address, port = mine.recv()
        store = dist.TCPStore(link.theirs, port, is_master=False, wait_for_workers=False)
        group = gloo(store, 0, timedelta(seconds=60), link.mine)
        messages = [os.urandom(MESSAGE) for _ in range(MOST // MESSAGE)]
        yield Peer(address, psutil.Process(process.pid), group, store, _memory().fill_(1), messages)
    finally:
        process.kill()
        process.join()


# --- ceilings ---------------------------------------------------------------------------------


async def memcpy(peer: Peer, target: torch.Tensor, mib: int) -> Cost:
    source, start = peer.memory[: mib * MIB], peer.now()
    await asyncio.to_thread(target[: mib * MIB].copy_, source)
    return peer.now().since(start)


async def raw_gloo(peer: Peer, mib: int, hot: bool = False) -> Cost:
    """From the first message to the other side's answer. As a hand-off does, it takes every byte
    from a place of its own to a place of its own; `hot`: out of three buffers into three."""
    count = max(1, mib * MIB // MESSAGE)
    order = [count, IN_FLIGHT if hot else count]
    memory, told = peer.memory[: mib * MIB], torch.tensor(order)

    def run() -> Cost:
        start = peer.now()
        peer.gloo.send([told], 1, 0).wait()
        _pump(peer.gloo.send, 1, memory, order)
        peer.gloo.recv([told], 1, 0).wait()
        return peer.now().since(start)

    return await asyncio.to_thread(run)


async def raw_grpc(peer: Peer, channels: ChannelPool, mib: int) -> Cost:
    count, size = max(1, mib * MIB // MESSAGE), min(MESSAGE, mib * MIB)
    messages = [message[:size] for message in peer.messages[:count]]
    call = channels.get(peer.address).stream_unary("/raw/Push")()
    start = peer.now()
    for message in messages:
        await call.write(message)
    await call.done_writing()
    await call
    return peer.now().since(start)
