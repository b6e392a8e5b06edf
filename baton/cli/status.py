"""`baton status`: the workers of a cluster and their load, as a table or as JSON.

Reads the registry when a Redis is named, else asks a router (`GET /workers`). Changes nothing.
"""

import asyncio
import json
from dataclasses import asdict

import httpx
from rich.console import Console
from rich.table import Table

from baton.cluster.errors import BatonError
from baton.cluster.registry import Registry
from baton.cluster.workers import WorkerLink, WorkerRecord

TIMEOUT_S = 5.0


def status(redis: str | None, url: str, as_json: bool) -> None:
    workers = workers_of(redis, url)
    if as_json:
        Console(highlight=False).out(json.dumps([asdict(worker) for worker in workers], indent=2))
    else:
        Console(highlight=False).print(table(workers) if workers else "There are no workers.")


def workers_of(redis: str | None, url: str) -> list[WorkerRecord]:
    """From the registry when a Redis is named, else from a router. Raises BatonError."""
    return asyncio.run(_from_redis(redis)) if redis else _from_router(url)


def table(workers: list[WorkerRecord]) -> Table:
    columns = (
        "role",
        "id",
        "address",
        "model",
        "running",
        "waiting",
        "blocks",
        "hand-offs",
        "kv to",
        "",
    )
    view = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for worker in sorted(workers, key=lambda worker: (worker.role != "prefill", worker.worker_id)):
        load = worker.load
        view.add_row(
            worker.role,
            worker.worker_id,
            worker.address,
            worker.model,
            f"{load.running}/{worker.max_num_seqs}",
            str(load.waiting),
            f"{load.free_blocks}/{worker.num_blocks} free",
            str(load.handoffs_in_flight),
            "\n".join(map(_link, worker.links)),
            "draining" if load.draining else "",
        )
    return view


def _link(link: WorkerLink) -> str:
    failing = f" ({', '.join(link.degraded)} failing)" if link.degraded else ""
    return f"{link.peer} {link.transport}{failing}"


async def _from_redis(url: str) -> list[WorkerRecord]:
    try:
        registry = Registry(url)
    except ValueError as error:
        raise BatonError(
            f"--redis must be a URL such as redis://127.0.0.1:6379/0: {error}"
        ) from error
    try:
        return await registry.list()
    finally:
        await registry.close()


def _from_router(url: str) -> list[WorkerRecord]:
    try:
        answer = httpx.get(f"{url.rstrip('/')}/workers", timeout=TIMEOUT_S, trust_env=False)
        answer.raise_for_status()
        return [WorkerRecord.from_json(json.dumps(worker)) for worker in answer.json()["workers"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise BatonError(
            f"The router at {url} does not tell its workers ({error}); "
            "name a router with --url or a Redis with --redis."
        ) from error
