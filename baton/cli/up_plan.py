"""What `baton up` starts: one ChildSpec per process, computed from settings, cores and model.

Pure: reads no clock, no network, no files. The router stops first so that requests in flight
still find their workers.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.cli.child_process import ChildSpec
from baton.cli.cores import share_cores
from baton.cli.up_settings import (
    DECODE_FIELDS,
    PREFILL_FIELDS,
    ROUTER_FIELDS,
    SHARED_FIELDS,
    WORKER_FIELDS,
    UpSettings,
)
from baton.cluster.values import format_cores

ROUTER_STOP_STAGE, WORKER_STOP_STAGE = 0, 1
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Site:
    """What is settled before the children start."""

    redis_url: str
    port: int
    model: str
    cores: tuple[int, ...]
    """Shared out to the workers; empty leaves it to others where they run."""
    given: dict[str, Any] = field(default_factory=dict)
    tls_dir: Path | None = None
    """Holds a folder of certificates for each role."""
    worker_host: str | None = "127.0.0.1"
    """None: whoever starts a worker says so in BATON_HOST."""


def plan(settings: UpSettings, site: Site) -> list[ChildSpec]:
    """Routers, then prefill workers, then decode workers."""
    roles = ["prefill"] * settings.prefill + ["decode"] * settings.decode
    shares = share_cores(site.cores, len(roles)) if site.cores else [()] * len(roles)
    workers = [
        worker_spec(settings, site, role, roles[:index].count(role), cores)
        for index, (role, cores) in enumerate(zip(roles, shares, strict=True))
    ]
    if settings.routers == 1:
        return [_router(settings, site, "router"), *workers]
    routers = [_router(settings, site, f"router-{n}") for n in range(settings.routers)]
    return [*routers, *workers]


def _router(settings: UpSettings, site: Site, name: str) -> ChildSpec:
    flags: dict[str, Any] = {
        "host": settings.host,
        "port": site.port,
        **settings.passed_on(ROUTER_FIELDS + SHARED_FIELDS, site.given),
    }
    if settings.routers > 1:
        flags["reuse_port"] = True
    argv = _command(("router",), "router", settings, site, flags)
    return ChildSpec(name, argv, _environment(site, 1), ROUTER_STOP_STAGE)


def worker_spec(
    settings: UpSettings, site: Site, role: str, index: int, cores: tuple[int, ...] = ()
) -> ChildSpec:
    """Worker number `index` of its role."""
    threads = settings.threads_per_worker or len(cores) or max(1, int(settings.cpus_per_worker))
    own = WORKER_FIELDS + (DECODE_FIELDS if role == "decode" else PREFILL_FIELDS)
    place: dict[str, Any] = {"host": site.worker_host} if site.worker_host else {}
    if cores:
        place["cores"] = format_cores(cores)
    flags = {
        **place,
        "port": 0,
        "worker_id": f"{role}-{index}",
        "threads": threads,
        **settings.passed_on(own + SHARED_FIELDS, site.given),
    }
    argv = _command(("baton", role), role, settings, site, flags)
    return ChildSpec(f"{role}-{index}", argv, _environment(site, threads), WORKER_STOP_STAGE)


def _command(
    module: tuple[str, ...], role: str, settings: UpSettings, site: Site, flags: dict[str, Any]
) -> tuple[str, ...]:
    common: dict[str, Any] = {"model": site.model}
    if settings.config is not None:
        common["config"] = settings.config
    if site.tls_dir is not None:
        common["tls_dir"] = site.tls_dir / role
    lines = [_flag(name, value) for name, value in (common | flags).items()]
    return (sys.executable, "-m", *module, *lines)


def _flag(name: str, value: Any) -> str:
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{dashed}" if value else f"--no-{dashed}"
    return f"--{dashed}={value}"


def _environment(site: Site, threads: int) -> dict[str, str]:
    """Redis' URL may hold a password, which a flag would show to everybody on the machine."""
    variables = {name: str(threads) for name in _THREAD_VARIABLES}
    return {**variables, "BATON_REDIS_URL": site.redis_url, "PYTHONUNBUFFERED": "1"}
