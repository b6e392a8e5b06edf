"""The other process of the transfer benchmark: a decode worker without a model, and bare
receivers for the ceilings."""

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import torch
import torch.distributed as dist

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
from baton.engine.transfer.torch_dist import _gloo
from baton.v1 import decode_pb2_grpc
from baton.worker.activity import Activity
from decode_service.inbox import Inbox
from decode_service.server import DecodeServicer
from decode_service.transfer import KVTransferServicer
from decode_service.worker import DecodeWorker

MIB = 1 << 20
MESSAGE = 4 * MIB
IN_FLIGHT = 3
VOCAB = 100


def layout_of() -> KVLayout:
    """32 layers of 8 heads of 64 in bf16, 16 tokens a block: 1 MiB per block."""
    return KVLayout("bench", 32, 8, 64, 16, "bfloat16", ("full",) * 32)


@dataclass
class Peer:
    address: str
    gloo: Any
    _store: Any


class _NoModel:
    """Logits that always choose token 1."""

    def run(self, batch: Any) -> torch.Tensor:
        rows = sum(item.samples for item in batch.items)
        return torch.nn.functional.one_hot(torch.ones(rows, dtype=torch.long), VOCAB).float()


def _decode_process(ready: Any) -> None:
    torch.set_num_threads(1)
    asyncio.run(_decode(ready))


async def _decode(ready: Any) -> None:
    settings = DecodeSettings.build(transport="auto")
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
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ready.send((address, store.port))
    group = await asyncio.to_thread(_gloo, store, 1, timedelta(seconds=60), "127.0.0.1")
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
    decode = DecodeServicer(worker, status, vocab_size, inbox)  # type: ignore[arg-type]
    transfer = KVTransferServicer(worker, inbox, cache.layout, "bench", 30.0)
    add_decode = partial(decode_pb2_grpc.add_DecodeServicer_to_server, decode)
    server, port = await make_server(
        [add_decode, transfer.add_to, _add_raw_grpc], "127.0.0.1:0", []
    )
    status.address = f"127.0.0.1:{port}"
    running.start()
    await server.start()
    return status.address, server


def _serve_raw_gloo(group: Any) -> None:
    """Each round: the number of messages, the messages, an answer. Zero messages end it."""
    count, buffers = torch.zeros(1, dtype=torch.int64), [_buffer() for _ in range(IN_FLIGHT)]
    while True:
        group.recv([count], 0, 0).wait(timedelta(hours=1))
        if not count.item():
            return
        _pump(group.recv, 0, buffers, int(count.item()))
        group.send([count], 0, 0).wait()


def _buffer() -> torch.Tensor:
    return torch.zeros(MESSAGE, dtype=torch.uint8)


def _pump(verb: Any, peer: int, buffers: list[torch.Tensor], count: int) -> None:
    works: list[Any] = []
    for number in range(count):
        works.append(verb([buffers[number % IN_FLIGHT]], peer, 1 + number))
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
def running_peer() -> Iterator[Peer]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_decode_process, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        address, port = mine.recv()
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        yield Peer(address, _gloo(store, 0, timedelta(seconds=60), "127.0.0.1"), store)
    finally:
        process.kill()
        process.join()


# --- ceilings ---------------------------------------------------------------------------------


def memcpy_s(mib: int, _kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}) -> float:  # noqa: B006
    if mib not in _kept:
        _kept[mib] = (torch.ones(mib * MIB, dtype=torch.uint8), torch.zeros(mib * MIB).byte())
    source, target = _kept[mib]
    start = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - start


async def raw_gloo_s(peer: Peer, mib: int) -> float:
    """From the first message to the other side's answer."""
    count = max(1, mib * MIB // MESSAGE)
    size = min(MESSAGE, mib * MIB)
    buffers, number = [_buffer()[:size] for _ in range(IN_FLIGHT)], torch.tensor([count])

    def run() -> float:
        start = time.perf_counter()
        peer.gloo.send([number], 1, 0).wait()
        _pump(peer.gloo.send, 1, buffers, count)
        peer.gloo.recv([number], 1, 0).wait()
        return time.perf_counter() - start

    return await asyncio.to_thread(run)


async def raw_grpc_s(peer: Peer, channels: ChannelPool, mib: int) -> float:
    message = bytes(min(MESSAGE, mib * MIB))
    call = channels.get(peer.address).stream_unary("/raw/Push")()
    start = time.perf_counter()
    for _ in range(max(1, mib * MIB // MESSAGE)):
        await call.write(message)
    await call.done_writing()
    await call
    return time.perf_counter() - start
