"""What the router costs: decisions, prefix look-ups against a real Redis, streamed requests.

`placement`: one decision of the slo policy among so many workers, half of them prefill, all with
load and some with a part of the prompt cached. `gateway`: see `_gateway.py` and `_routers.py`.

`prefix_lookup`: one look-up of a prompt on 64 workers that all hold a part of it, of a different
length each: the dearest case. `prefix_hash` is what the router computes before it asks.

    python bench/router.py [--quick] [--json FILE]
"""

import asyncio
import os
import random
import time

import _gateway
import _routers
from _common import Report, parser
from _sim_workers import SPEEDS, make_workers

from baton.cluster.prefix_index import PrefixIndex, PrefixStore, PromptBlocks
from baton.cluster.prefix_index.matches import key_of
from baton.cluster.prefix_index.store import CHUNK
from baton.cluster.redis_link import RedisLink
from baton.cluster.redis_server import EmbeddedRedis
from baton.cluster.workers import KVLayout, Role, WorkerLoad, WorkerRecord, new_incarnation
from router.placement import Candidate, RequestFacts, Rules, place
from router.placement.slo import Slo
from router.predictor import Predictor
from router.targets import Targets

WORKERS = 64
GPU = SPEEDS["gpu"]
OTHER_BLOCKS = 4000
LAYOUT = KVLayout("f" * 16, 30, 3, 64, 16, "bfloat16")
SIZES = {"1k": 1024, "8k": 8192, "128k": 131_072}


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    report = Report("router")
    _placements(report, 300 if arguments.quick else 3000)
    asyncio.run(_prefix_lookups(report, 100 if arguments.quick else 1000))
    asyncio.run(_gateway.measure(report, 200 if arguments.quick else 1000))
    asyncio.run(_routers.measure(report, 100 if arguments.quick else 400))
    report.finish(arguments.json)


def _placements(report: Report, rounds: int) -> None:
    for count in (4, 16, 64, 256):
        draw, predictor, rules = random.Random(count), Predictor(), Rules(backlog_s=60.0)
        workers = [worker.record for worker in make_workers(count // 2, count // 2, GPU, 1)]
        seconds = []
        for number in range(rounds):
            candidates = [
                Candidate(
                    worker,
                    requests=draw.randint(0, 8),
                    tokens=draw.randint(0, 4000),
                    free_blocks=draw.randint(300, 4096),
                    cached_tokens=draw.choice((0, 0, 0, 512)),
                )
                for worker in workers
            ]
            request = RequestFacts(1024, 200, 1, Targets(1.0, 0.05), number=number)
            start = time.perf_counter()
            place(Slo(), request, candidates, predictor, rules)
            seconds.append(time.perf_counter() - start)
        seconds.sort()
        report.add(f"placement.p50_ms.{count}", seconds[rounds // 2] * 1e3, "ms")
        report.add(f"placement.p99_ms.{count}", seconds[rounds * 99 // 100] * 1e3, "ms")


async def _prefix_lookups(report: Report, rounds: int) -> None:
    redis = EmbeddedRedis()
    url = await redis.start()
    try:
        for name, tokens in SIZES.items():
            await _prefix_lookup(report, url, name, tokens, rounds)
    finally:
        await redis.stop()


async def _prefix_lookup(report: Report, url: str, name: str, tokens: int, rounds: int) -> None:
    draw = random.Random(0)
    prompt = PromptBlocks([draw.randrange(50_000) for _ in range(tokens)])
    start = time.perf_counter()
    hashes = prompt.hashes(LAYOUT)
    report.add(f"prefix_hash.ms.{name}", (time.perf_counter() - start) * 1e3, "ms")
    link = RedisLink(url)
    store = PrefixStore(link.client)
    workers = [_worker(index) for index in range(WORKERS)]
    lengths = [draw.randrange(len(hashes)) for _ in workers]
    for worker, length in zip(workers, lengths, strict=True):
        await _fill(store, worker, hashes[:length])
    index, seconds = PrefixIndex(link, store), []
    for _ in range(rounds):
        start = time.perf_counter()
        matches = await index.lookup(prompt, workers)
        seconds.append(time.perf_counter() - start)
        if [matches.held_tokens(worker) // 16 for worker in workers] != lengths:
            raise SystemExit("a look-up found something else than what the workers hold")
    await link.close()
    seconds.sort()
    report.add(f"prefix_lookup.p50_ms.{name}", seconds[rounds // 2] * 1e3, "ms")
    report.add(f"prefix_lookup.p99_ms.{name}", seconds[rounds * 99 // 100] * 1e3, "ms")


async def _fill(store: PrefixStore, worker: WorkerRecord, hashes: list[bytes]) -> None:
    blocks = [*hashes, *(os.urandom(16) for _ in range(OTHER_BLOCKS))]
    parts = [blocks[at : at + CHUNK] for at in range(0, len(blocks), CHUNK)]
    for part in parts:
        await store.replace(key_of(worker), 1, part, 3600, last=part is parts[-1])


def _worker(index: int) -> WorkerRecord:
    role = Role.PREFILL if index % 2 else Role.DECODE
    return WorkerRecord(
        worker_id=f"{role}-{index}",
        incarnation=new_incarnation(),
        role=role,
        address="127.0.0.1:1",
        model="bench",
        layout=LAYOUT,
        max_model_len=131_072,
        max_num_seqs=64,
        num_blocks=100_000,
        load=WorkerLoad(),
    )


if __name__ == "__main__":
    main()
