"""Keeps each pool at the count that its policy wants: adds processes, drains and removes them.

What leaves first takes nothing new and finishes what it has, for `DRAIN_S` at most; only then it is
stopped. While signals are missing nothing changes.
"""

import asyncio
import time
from collections.abc import Iterable
from typing import Protocol

from baton.cli.supervisor import Say
from baton.cluster.errors import BatonError
from baton.cluster.workers import Role, WorkerRecord
from baton_ray.autoscale.policy import PoolPolicy, PoolState
from baton_ray.autoscale.signals import Signals, SignalsUnavailable

PERIOD_S = 1.0
DRAIN_S = 300.0


class Processes(Protocol):
    """Where workers are added and removed."""

    def names(self) -> Iterable[str]: ...
    def add(self, role: Role, number: int) -> None: ...
    async def drain(self, worker: WorkerRecord, timeout_s: float) -> bool: ...
    async def remove(self, name: str) -> None: ...


class Scaler:
    """`policies`: of the pools that have room between their bounds."""

    def __init__(
        self, policies: dict[Role, PoolPolicy], signals: Signals, processes: Processes, say: Say
    ) -> None:
        self._policies = policies
        self._signals = signals
        self._processes = processes
        self._say = say
        self._blind: bool | None = None
        self._leaving: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await asyncio.sleep(PERIOD_S)  # a sampled quantity: there is nothing to wait on
                try:
                    records, states = await self._signals.read()
                except SignalsUnavailable as error:
                    self._tell(str(error))
                    continue
                self._tell("")
                self.step(time.monotonic(), records, states)
        finally:
            for task in self._leaving.values():
                task.cancel()
            await asyncio.gather(*self._leaving.values(), return_exceptions=True)
            await self._signals.close()

    def _tell(self, missing: str) -> None:
        """Once each time that signals go or come back."""
        if bool(missing) is not self._blind:
            self._blind = bool(missing)
            self._say("baton", f"pools stay as they are: {missing}" if missing else "pools scale")

    def step(self, now: float, records: list[WorkerRecord], states: dict[Role, PoolState]) -> None:
        for role, policy in self._policies.items():
            before, wanted = policy.wanted, policy.decide(now, states[role])
            if wanted != before:
                state = states[role]
                reason = f"load {state.load:.1f}, {state.missed:.0%} of targets missed"
                self._say("baton", f"{role} workers: {before} → {wanted} ({reason})")
            self._approach(role, wanted, records)

    def _approach(self, role: Role, wanted: int, records: list[WorkerRecord]) -> None:
        names = set(self._processes.names())
        mine = sorted(_numbers(role, names - set(self._leaving)))
        free = (n for n in range(len(names) + wanted) if f"{role}-{n}" not in names)
        for _ in range(wanted - len(mine)):
            self._processes.add(role, next(free))
        for number in mine[wanted:]:
            self._let_go(f"{role}-{number}", records)

    def _let_go(self, name: str, records: list[WorkerRecord]) -> None:
        record = next((r for r in records if r.worker_id == name), None)
        task = asyncio.create_task(self._leave(name, record), name=f"leave {name}")
        self._leaving[name] = task
        task.add_done_callback(lambda _: self._leaving.pop(name, None))

    async def _leave(self, name: str, record: WorkerRecord | None) -> None:
        """One that is not announced has nothing to finish."""
        if record is not None:
            try:
                drained = await self._processes.drain(record, DRAIN_S)
            except BatonError as error:
                self._say("baton", f"{name} leaves undrained: {error}")
            else:
                self._say("baton", f"{name} leaves" + ("" if drained else ", still busy"))
        await self._processes.remove(name)


def _numbers(role: Role, names: Iterable[str]) -> list[int]:
    return [int(name.rpartition("-")[2]) for name in names if name.startswith(f"{role}-")]
