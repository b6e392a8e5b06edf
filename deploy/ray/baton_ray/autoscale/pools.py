"""The pools of one Baton on Ray, and what scales those that have room between their bounds."""

import os

from baton.cli.drain import drain_worker
from baton.cli.ground import Helpers
from baton.cli.supervisor import Say, Supervisor
from baton.cli.up import router_url
from baton.cli.up_plan import Site, worker_spec
from baton.cli.up_settings import UpSettings
from baton.cluster.tls.folder import open_tls
from baton.cluster.workers import Role, WorkerRecord
from baton_ray.autoscale.policy import PoolPolicy, Rules
from baton_ray.autoscale.scaler import Scaler
from baton_ray.autoscale.signals import Signals, Targets
from baton_ray.placer import Placer

SERVER_NAME = "BATON_TLS_SERVER_NAME"


def scaling(
    settings: UpSettings, placer: Placer, supervisor: Supervisor, site: Site, say: Say
) -> Helpers:
    """A scaler, if there is a pool that may grow."""
    bounds = {
        Role.PREFILL: (settings.prefill, settings.max_prefill or 0),
        Role.DECODE: (settings.decode, settings.max_decode or 0),
    }
    rules = Rules(down_after_s=settings.scale_down_after_s)
    policies = {
        role: PoolPolicy(least, most, rules)
        for role, (least, most) in bounds.items()
        if most > least
    }
    if not policies:
        return []
    targets = Targets(settings.ttft_ms, settings.tpot_ms)
    signals = Signals(site.redis_url, router_url(settings, site.port), targets)
    scaler = Scaler(policies, signals, _Pool(settings, placer, supervisor, site), say)
    return [scaler.run()]


class _Pool:
    """The workers of a supervisor, to a scaler."""

    def __init__(
        self, settings: UpSettings, placer: Placer, supervisor: Supervisor, site: Site
    ) -> None:
        self._settings = settings
        self._placer = placer
        self._supervisor = supervisor
        self._site = site
        admin = site.tls_dir / "admin" if site.tls_dir else None
        self._tls = open_tls(admin, os.environ.get(SERVER_NAME))

    def names(self) -> list[str]:
        return self._supervisor.names()

    def add(self, role: Role, number: int) -> None:
        self._supervisor.add(worker_spec(self._settings, self._site, role, number))

    async def drain(self, worker: WorkerRecord, timeout_s: float) -> bool:
        return await drain_worker(worker, timeout_s, tls=self._tls)

    async def remove(self, name: str) -> None:
        await self._supervisor.remove(name)
        self._placer.release(name)
