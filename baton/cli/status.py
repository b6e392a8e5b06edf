"""`baton status`: the workers of a cluster and their load, as a table or as JSON, once or followed.

Reads the registry when a Redis is named, else asks a router (`GET /workers`). Changes nothing.
"""

import asyncio
import json
import time
from dataclasses import asdict

import httpx
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from baton.cli.local import key_headers
from baton.cluster.errors import BatonError
from baton.cluster.registry import Registry
from baton.cluster.workers import WorkerLink, WorkerRecord

TIMEOUT_S = 5.0
PERIOD_S = 1.0
WIDE = 130


def status(redis: str | None, url: str, as_json: bool, watch: bool = False) -> None:
    """`watch`: a table that follows the cluster until Ctrl-C."""
    console = Console(highlight=False)
    workers = workers_of(redis, url)
    if as_json:
        console.out(json.dumps([asdict(worker) for worker in workers], indent=2))
    elif not watch:
        console.print(_shown(workers, console))
    else:
        with Live(_shown(workers, console), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(PERIOD_S)
                live.update(_latest(redis, url, console), refresh=True)


def _latest(redis: str | None, url: str, console: Console) -> RenderableType:
    try:
        return _shown(workers_of(redis, url), console)
    except BatonError as error:
        return str(error)  # it may come back: go on asking


def _shown(workers: list[WorkerRecord], console: Console) -> RenderableType:
    return table(workers, console.width) if workers else "There are no workers."


def workers_of(redis: str | None, url: str) -> list[WorkerRecord]:
    """From the registry when a Redis is named, else from a router. Raises BatonError."""
    return asyncio.run(_from_redis(redis)) if redis else _from_router(url)


def table(workers: list[WorkerRecord], width: int = 200) -> Table:
    """Ids are never cut: where room is scarce, address, model and links are left out, and an id
    goes over several lines."""
    wide = width >= WIDE
    view = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("role", "id", "running", "waiting", "blocks", "hand-offs", ""):
        view.add_column(name, no_wrap=name != "id", overflow="fold")
    for name in ("address", "model", "kv to") if wide else ():
        view.add_column(name, overflow="fold")
    for worker in sorted(workers, key=lambda worker: (worker.role != "prefill", worker.worker_id)):
        load = worker.load
        cells = [
            worker.role,
            worker.worker_id,
            f"{load.running}/{worker.max_num_seqs}",
            str(load.waiting),
            f"{load.free_blocks}/{worker.num_blocks} free",
            str(load.handoffs_in_flight),
            "draining" if load.draining else "",
        ]
        if wide:
            cells += [worker.address, worker.model, "\n".join(map(_link, worker.links))]
        view.add_row(*cells)
    return view


def _link(link: WorkerLink) -> str:
    failing = f" ({', '.join(link.degraded)} failing)" if link.degraded else ""
    return f"{link.peer} {link.transport}{failing}"


async def _from_redis(url: str) -> list[WorkerRecord]:
    try:
        registry = Registry(url, timeout_s=TIMEOUT_S)
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
        answer = httpx.get(
            f"{url.rstrip('/')}/workers",
            headers=key_headers(),
            timeout=TIMEOUT_S,
            trust_env=False,
        )
        answer.raise_for_status()
        return [WorkerRecord.from_json(json.dumps(worker)) for worker in answer.json()["workers"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise BatonError(
            f"The router at {url} does not tell its workers ({error}); "
            "name a router with --url or a Redis with --redis."
        ) from error
