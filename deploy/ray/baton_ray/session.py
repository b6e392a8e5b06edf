"""A connection to a Ray cluster, or a cluster of one node of our own, and Baton's ground on it."""

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.util import get_node_ip_address

from baton.cli.ground import Ground
from baton.cli.supervisor import RestartPolicy
from baton.cli.up_plan import Site
from baton.cli.up_settings import UpSettings
from baton.cluster.errors import BatonError
from baton.cluster.redis_server import EmbeddedRedis
from baton_ray.autoscale.pools import scaling
from baton_ray.placer import Placer, this_node

LOOPBACK = "127.0.0.1"
# Nothing of ours goes through it; this is the least that Ray takes.
OBJECT_STORE_BYTES = 80 << 20
KNOCK_S = 5.0


@contextlib.contextmanager
def ray_session(settings: UpSettings) -> Iterator[Ground]:
    """Connected for as long as the context lasts. Raises BatonError when there is no cluster."""
    assert settings.ray is not None
    address = settings.ray
    if address == "default":
        address = os.environ.get("RAY_ADDRESS") or "local"
    if address.startswith("ray://"):
        raise BatonError(
            f"--ray {address} is a Ray Client, whose driver is outside the cluster. Run it inside: "
            "ray job submit -- baton up --ray"
        )
    _connect(address, settings)
    try:
        yield ray_ground(settings, Placer(settings, this_node()), local=address == "local")
    finally:
        ray.shutdown()


def _connect(address: str, settings: UpSettings) -> None:
    options: dict[str, Any] = {"logging_level": "warning", "namespace": "baton"}
    if address == "local":
        # Ray starts workers with niceness 15; these serve, and would starve on a busy machine.
        os.environ.setdefault("RAY_worker_niceness", "0")
        options |= {
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            # As many as are needed: on one machine the workers share its cores anyway.
            "num_cpus": max(_most_cpus(settings), os.cpu_count() or 1),
        }
    elif address != "auto":
        _knock(address)
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise BatonError(f"There is no Ray cluster at --ray {settings.ray}: {error}") from error


def _knock(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), KNOCK_S).close()
    except (OSError, ValueError) as error:
        raise BatonError(f"There is no Ray cluster at --ray {address}: {error}") from error


def _most_cpus(settings: UpSettings) -> int:
    workers = (settings.max_prefill or settings.prefill) + (settings.max_decode or settings.decode)
    return round(workers * settings.cpus_per_worker + 0.5)


def ray_ground(settings: UpSettings, placer: Placer, local: bool) -> Ground:
    """`local`: all on this machine, so nothing needs to be reachable from another one."""
    host = LOOPBACK if local else get_node_ip_address()
    return Ground(
        redis=lambda: EmbeddedRedis(host),
        settle=partial(_settle, settings, LOOPBACK if local else None),
        start=placer.start,
        # Whatever ends may be started on another node: never give up.
        restarts=RestartPolicy(max_restarts=None),
        helpers=partial(scaling, settings, placer),
        close=placer.close,
    )


def _settle(settings: UpSettings, worker_host: str | None, site: Site) -> Site:
    """Ray shares out the cores; every node looks the model up in its own store."""
    return replace(
        site,
        cores=(),
        worker_host=worker_host,
        model=settings.model,
        tls_dir=settings.tls_dir,
    )
