"""How much of a hand-off is not hidden behind the prefill's compute, with the real model.

The decode worker is a process of its own; the prefill worker is this one. Exposed is the time
from the first token to decode's acknowledgement of the commit.
"""

import asyncio
import multiprocessing
import random
import statistics
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from _transfer_peer import serve_decode

from baton.cluster.rpc import ChannelPool
from baton.cluster.settings import DecodeSettings, PrefillSettings
from baton.engine.async_engine import AsyncEngine
from baton.engine.decode_scheduler import DecodeScheduler
from baton.engine.prefill_scheduler import PrefillScheduler
from baton.engine.sampling_params import SamplingParams
from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from baton.worker.activity import Activity
from baton.worker.boot import boot
from prefill_service.pairs import Pairs
from prefill_service.worker import Done, PrefillJob, PrefillWorker, Started

TRANSPORTS = {"shm": "shm", "gloo": "torch", "grpc": "grpc"}


def _decode_process(ready: Any) -> None:
    torch.set_num_threads(1)
    asyncio.run(_decode(ready))


async def _decode(ready: Any) -> None:
    settings = DecodeSettings.build(enable_prefix_cache=False)
    parts = boot(settings, DecodeScheduler)
    address, server = await serve_decode(settings, parts.engine, parts.cache, parts.vocab_size)
    ready.send(address)
    await server.wait_for_termination()


def exposed_shares(prompt_tokens: int, rounds: int) -> dict[str, float]:
    """Exposed seconds over TTFT: median, by transport."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_decode_process, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that a process that dies is noticed
    try:
        return asyncio.run(_measure(mine.recv(), prompt_tokens, rounds))
    finally:
        process.kill()
        process.join()


async def _measure(address: str, prompt_tokens: int, rounds: int) -> dict[str, float]:
    settings = PrefillSettings.build(enable_prefix_cache=False)
    parts = boot(settings, PrefillScheduler)
    engine, channels = AsyncEngine(parts.engine), ChannelPool()
    engine.start()
    worker = PrefillWorker(engine, parts.cache.layout, Activity())
    pairs = {
        name: Pairs(PrefillSettings.build(transport=transport), parts.cache, channels, parts.memory)
        for name, transport in TRANSPORTS.items()
    }
    shares: dict[str, list[float]] = {name: [] for name in TRANSPORTS}
    for number in range(rounds + 1):
        for name in TRANSPORTS:
            prompt = random.Random(number).choices(range(1000, 20000), k=prompt_tokens)
            share = await _one(worker, pairs[name], channels, address, prompt)
            if number:
                shares[name].append(share)
    for each in pairs.values():
        await each.close()
    await channels.close()
    await engine.stop()
    return {name: statistics.median(values) for name, values in shares.items()}


async def _one(
    worker: PrefillWorker, pairs: Pairs, channels: ChannelPool, address: str, prompt: list[int]
) -> float:
    sampling = common_pb2.SamplingParams(
        top_p=1, repetition_penalty=1, n=1, max_tokens=2, ignore_eos=True
    )
    request = decode_pb2.GenerateRequest(
        request_id="bench", prompt_token_ids=prompt, sampling=sampling
    )
    decode = decode_pb2_grpc.DecodeStub(channels.get(address))
    events = aiter(decode.Generate(request))
    reservation = (await anext(events)).reserved.reservation
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    sender = partial(pairs.sender, reservation)
    seen = SimpleNamespace(queue_s=0.0, share=0.0)
    async for event in worker.prefill(PrefillJob(prompt, params, open_sender=sender)):
        if isinstance(event, Started):
            seen.queue_s = event.started_at - event.received_at
        elif isinstance(event, Done):
            seen.share = event.transfer_s / (seen.queue_s + event.compute_s)
    async for _ in events:
        continue
    return seen.share
