"""The words between the HTTP side and the conductor: a job, where its tokens go, what came of it.

Plain data and two protocols; no behaviour beyond arithmetic.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.cluster.workers import WorkerRecord
from baton.v1 import common_pb2
from router.generation import Delta, Generation
from router.placement import RequestFacts


class Workers(Protocol):
    """The part of the cluster's Directory that the conductor uses."""

    def snapshot(self) -> tuple[WorkerRecord, ...]: ...
    def suspect(self, worker_id: str, incarnation: str) -> None: ...
    async def wait_changed(self, timeout_s: float) -> None: ...


class Output(Protocol):
    """Where tokens go. `committed`: something of this attempt has reached the client."""

    generation: Generation
    committed: bool

    def restart(self) -> None: ...
    async def deliver(self, deltas: Sequence[Delta]) -> None: ...


@dataclass(frozen=True)
class Job:
    """One prompt to serve. Deadlines are event loop times."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: common_pb2.SamplingParams
    cache_salt: str
    queue_deadline: float
    deadline: float

    @property
    def facts(self) -> RequestFacts:
        sampling = self.sampling
        return RequestFacts(len(self.prompt_token_ids), sampling.max_tokens, sampling.n)

    def time_left(self) -> float:
        return max(self.deadline - asyncio.get_running_loop().time(), 0.001)


@dataclass
class Served:
    """What one attempt found out."""

    num_cached_tokens: int = 0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
