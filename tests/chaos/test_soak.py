"""Random load and random faults for a long time: answers stay right, and nothing grows.

One prefill worker per transport. `prefill-0`, `decode-0` and the router are stopped and cut off
but never killed: what they hold at rest is compared between the first rest and the last.
BATON_SOAK_S sets the seconds, BATON_SOAK_SEED repeats a run.
"""

import asyncio
import os
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.store import StoredModel
from tests.support.answers import Answer
from tests.support.chaos_cluster import ChaosCluster, Node, chaos_cluster
from tests.support.hosts import Network, namespaces_allowed

SOAK_S = float(os.environ.get("BATON_SOAK_S", "900"))
SEED = int(os.environ.get("BATON_SOAK_SEED", "0")) or time.time_ns() % 1_000_000
pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(SOAK_S + 900)]

CLIENTS = 6
ROUND_S = 30.0
"""Between two rests."""
NEVER_KILLED = ("prefill-0", "decode-0", "router-0")
ANSWER_TIMEOUT_S = 60.0
MAX_FAILED_SHARE = 0.02
"""A request may meet three faults and end with an error."""
# A torch group more or less has some ten descriptors, three of them sockets, and an allocator's
# arena may be larger once; a leak grows with the faults, of which there are hundreds.
MORE_DESCRIPTORS = 24
MORE_SOCKETS = 8
MORE_BYTES = 48 << 20


@dataclass
class Holding:
    """What a process holds at rest."""

    bytes: int
    descriptors: int
    sockets: int
    segments: int
    threads: int

    @classmethod
    def of(cls, node: Node) -> "Holding":
        process = psutil.Process(node.pid)
        links = [_target(fd) for fd in Path(f"/proc/{node.pid}/fd").iterdir()]
        return cls(
            bytes=process.memory_info().rss,
            descriptors=len(links),
            sockets=sum(link.startswith("socket:") for link in links),
            segments=len(node.segments()),
            threads=process.num_threads(),
        )


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:
        return ""


class Soak:
    def __init__(self, cluster: ChaosCluster, rng: random.Random) -> None:
        self.cluster = cluster
        self.rng = rng
        self.counts: Counter[str] = Counter()
        self.router_faults = 0
        """Grows when one begins and when it ends: odd while there is one."""
        self.expected: list[tuple[dict[str, Any], Answer]] = []

    async def learn(self) -> None:
        for number in range(16):
            body = {
                "prompt": [self.rng.randrange(32, 127) for _ in range(self.rng.randrange(1, 500))],
                "max_tokens": self.rng.randrange(1, 40),
                "n": self.rng.choice([1, 1, 2]),
                "temperature": self.rng.choice([0, 0.9]),
                "top_k": 8,
                "seed": number,
                "ignore_eos": True,
            }
            self.expected.append((body, await self.cluster.ask(**body)))

    async def load(self, until: float) -> None:
        """One client: a request after the other; one in five leaves early."""
        while time.monotonic() < until:
            body, expected = self.rng.choice(self.expected)
            salt = self.rng.choice(["", "shared", str(self.rng.random())])
            body = body | ({"cache_salt": salt} if salt else {"cache_salt": "common"})
            faults = self.router_faults
            asking = asyncio.create_task(self.cluster.ask(**body))
            leaves = self.rng.random() < 0.2
            patience = self.rng.uniform(0, 0.5) if leaves else ANSWER_TIMEOUT_S
            await asyncio.wait({asking}, timeout=patience)
            if not asking.done():
                assert leaves, "a request hangs"
                asking.cancel()
            (answer,) = await asyncio.gather(asking, return_exceptions=True)
            with_router = faults % 2 == 1 or faults != self.router_faults
            self._count(answer, expected, with_router)

    def _count(self, answer: Any, expected: Answer, with_router: bool) -> None:
        if isinstance(answer, asyncio.CancelledError):
            self.counts["left"] += 1
        elif isinstance(answer, Answer):
            assert answer.texts == expected.texts and answer.tokens == expected.tokens
            assert answer.counts == expected.counts
            self.counts["answered"] += 1
        elif with_router:
            self.counts["failed with their router"] += 1
        else:
            self.counts["failed"] += 1
            print(f"failed: {answer!r}"[:300])

    async def faults(self, until: float) -> None:
        """One at a time; the victim is whole again before the next."""
        while time.monotonic() < until:
            victim = self.rng.choice(list(self.cluster.nodes.values()))
            ways = ["stop", "cut"] if namespaces_allowed() else ["stop"]
            if victim.name not in NEVER_KILLED:
                ways += ["kill", "kill"]
            way = self.rng.choice(ways)
            self.counts[f"{way} {victim.role}"] += 1
            self.router_faults += victim.role == "router"
            getattr(victim, way)()
            await asyncio.sleep(self.rng.uniform(0, 5))  # the fault lasts, it is not waited for
            victim.restore()
            await self.cluster.wait_ready()
            self.router_faults += victim.role == "router"

    async def round(self, length_s: float) -> dict[str, Holding]:
        until = time.monotonic() + length_s
        async with asyncio.TaskGroup() as group:
            group.create_task(self.faults(until))
            for _ in range(CLIENTS):
                group.create_task(self.load(until))
        await self.cluster.restore()
        return {name: Holding.of(self.cluster.nodes[name]) for name in NEVER_KILLED}


async def test_nothing_grows_under_random_load_and_faults(
    tiny_chat: StoredModel, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "prefill": {"transport_retry_s": 0.5},
        "prefill_0": {"transport": "shm"},
        "prefill_1": {"transport": "torch"},
        "prefill_2": {"transport": "grpc"},
    }
    print(f"\nsoak of {SOAK_S:g} s, seed {SEED}")
    with Network(apart=namespaces_allowed()) as network:
        async with chaos_cluster(tiny_chat.path, tmp_path, network, 3, 2, **settings) as cluster:
            soak = Soak(cluster, random.Random(SEED))
            await soak.learn()
            ends = time.monotonic() + SOAK_S
            rests = [await soak.round(min(ROUND_S, SOAK_S / 4))]
            while (left := ends - time.monotonic()) > 1:
                rests.append(await soak.round(min(ROUND_S, left)))
                print(dict(soak.counts), rests[-1])
    _report(soak.counts, rests)
    answered, failed = soak.counts["answered"], soak.counts["failed"]
    assert failed <= MAX_FAILED_SHARE * (answered + failed) + 1
    for name in NEVER_KILLED:
        first, last = rests[0][name], rests[-1][name]
        assert last.descriptors <= first.descriptors + MORE_DESCRIPTORS, name
        assert last.sockets <= first.sockets + MORE_SOCKETS, name
        assert last.segments <= first.segments, name
        assert last.threads <= first.threads + MORE_DESCRIPTORS, name
        assert last.bytes <= first.bytes + MORE_BYTES, name


def _report(counts: Counter[str], rests: list[dict[str, Holding]]) -> None:
    print({name: counts[name] for name in sorted(counts)}, f"{len(rests)} rests")
    for name in NEVER_KILLED:
        print(f"{name}: first {rests[0][name]}\n{name}: last  {rests[-1][name]}")
