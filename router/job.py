"""The words between the HTTP side and the conductor: a job, where its tokens go, what came of it.

Plain data and two protocols; no behaviour beyond arithmetic.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from baton.cluster.ledger import Trail
from baton.cluster.prefix_index import PromptBlocks
from baton.cluster.workers import WorkerRecord
from baton.kv_policy import FULL, KVPolicy
from baton.v1 import common_pb2
from router.calls import WorkerFault
from router.generation import Delta, Generation
from router.placement import Plan, RequestFacts
from router.targets import Targets, Unattainable

GRACE_S = 1.0


class Workers(Protocol):
    """The part of the cluster's Directory that the conductor uses."""

    def snapshot(self) -> tuple[WorkerRecord, ...]: ...
    @property
    def doubted(self) -> bool: ...
    def suspect(self, worker_id: str, incarnation: str) -> None: ...
    async def wait_changed(self, timeout_s: float) -> None: ...


class Output(Protocol):
    """Where tokens go."""

    generation: Generation

    def render(self, deltas: Sequence[Delta]) -> bytes:
        """Keeps the deltas; what is to be sent for them now, if anything."""
        ...

    def send(self, rendered: bytes) -> Awaitable[None]: ...


@dataclass(frozen=True)
class Job:
    """One prompt to serve. Deadlines are event loop times."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: common_pb2.SamplingParams
    cache_salt: str
    queue_deadline: float
    deadline: float
    trail: Trail = field(default_factory=Trail)
    """Where the time goes, for the ledger."""
    arrived_at: float = field(default_factory=time.monotonic)
    targets: Targets = field(default_factory=Targets)
    tenant: str = ""
    cache_key: str = ""
    """Requests of one key belong together, whatever their prompts: `prompt_cache_key`."""
    pins: tuple[tuple[int, float], ...] = ()
    """Leading tokens to keep cached, and for how many seconds."""
    explain: bool = False
    kv_policy: KVPolicy = FULL

    def waited_s(self) -> float:
        return time.monotonic() - self.arrived_at

    @property
    def latest_turn(self) -> float:
        """After that it is not worth serving any more."""
        if not self.targets.reject:
            return self.queue_deadline
        return min(self.queue_deadline, self.arrived_at + self.targets.ttft_s)

    def too_late(self) -> Unattainable | None:
        """Why it is refused, when its target has passed in the queue."""
        waited_s = self.waited_s()
        if self.targets.reject and waited_s >= self.targets.ttft_s:
            return Unattainable(self.targets, waited_s, 0.0)
        return None

    def time_left(self) -> float:
        """For calls to workers: they end a little after the router, who tells the client."""
        return max(self.deadline - asyncio.get_running_loop().time(), 0.0) + GRACE_S


@dataclass
class Turn:
    """What a leg has found out since it was let through. `full`: workers that had no room for it;
    `guessed`: where its prompt is cached is not known, but likely."""

    full: set[str] = field(default_factory=set)
    guessed: bool = False


@dataclass(frozen=True)
class Leg:
    """The part of a job that one attempt serves: all of it, or, after a worker was lost, one
    choice from where it stands. `failures` led up to it, and grow with it."""

    job: Job
    choices: tuple[int, ...]
    sampling: common_pb2.SamplingParams
    output_token_ids: tuple[int, ...] = ()
    failures: list[WorkerFault] = field(default_factory=list)
    room_by: float | None = None
    """Until when it may wait for room (event loop time); None: as long as its job may."""
    turn: Turn = field(default_factory=Turn)

    @classmethod
    def whole(cls, job: Job) -> "Leg":
        return cls(job, tuple(range(job.sampling.n)), job.sampling)

    def resumed(self, choice: int, token_ids: Sequence[int], room_by: float) -> "Leg":
        """`choice` alone, after the tokens it has given. Its job's time in the queue may be long
        over, so its wait for room has one of its own."""
        sampling = common_pb2.SamplingParams()
        sampling.CopyFrom(self.sampling)
        sampling.n = 1
        failures = [*self.failures]
        return Leg(self.job, (choice,), sampling, tuple(token_ids), failures, room_by)

    @property
    def lost(self) -> list[WorkerRecord]:
        """Workers that failed it."""
        return [failure.worker for failure in self.failures]

    @property
    def facts(self) -> RequestFacts:
        done = len(self.output_token_ids)
        num_prompt_tokens = len(self.job.prompt_token_ids) + done
        left, n = self.sampling.max_tokens - done, self.sampling.n
        if self.sampling.HasField("beam"):  # always ends on decode
            left, n = max(left, 2), self.sampling.beam.width
        return RequestFacts(
            num_prompt_tokens,
            left,
            n,
            self.job.targets,
            self.job.waited_s(),
            kv_policy=self.job.kv_policy,
        )

    @cached_property
    def blocks(self) -> PromptBlocks:
        """Of what prefill has to compute."""
        token_ids = [*self.job.prompt_token_ids, *self.output_token_ids]
        job = self.job
        return PromptBlocks(token_ids, job.cache_salt, job.cache_key, job.kv_policy)

    @property
    def ships_less(self) -> bool:
        """Whether decode gets a cache that lacks tokens, which nobody can share."""
        return self.job.kv_policy.compacts(len(self.job.prompt_token_ids))

    @property
    def pins(self) -> list[common_pb2.CachePin]:
        return [
            common_pb2.CachePin(num_tokens=count, ttl_s=ttl_s, tenant=self.job.tenant)
            for count, ttl_s in self.job.pins
        ]

    @property
    def first_token_within_s(self) -> float | None:
        """Of now, by its target; None without one, and for a leg whose first token is out."""
        if self.output_token_ids or math.isinf(self.job.targets.ttft_s):
            return None
        return max(self.job.targets.ttft_s - self.job.waited_s(), 0.0)

    @property
    def continuation(self) -> common_pb2.Continuation | None:
        """None for a leg that starts from the prompt."""
        if not self.output_token_ids:
            return None
        return common_pb2.Continuation(
            choice=self.choices[0], output_token_ids=self.output_token_ids
        )


@dataclass
class Served:
    """What the attempts found out. `plan`: the first one, with `alternatives` when an explanation
    was asked for."""

    num_cached_tokens: int = 0
    plan: Plan | None = None
    outrun: int = 0
    """Times that another router loaded the chosen workers first."""
    alternatives: list[Plan] = field(default_factory=list)
    first_token_at: float = 0.0
    last_token_at: float = 0.0
