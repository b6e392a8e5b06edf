"""`baton drain`: one worker finishes what it has and takes nothing new, until told otherwise.

The worker goes on living, and announces that it drains; routers send it nothing.
"""

import asyncio

import grpc
from rich.console import Console

from baton.cli.status import workers_of
from baton.cluster.errors import BatonError
from baton.cluster.rpc import open_channel
from baton.cluster.tls import TlsFolder
from baton.cluster.workers import WorkerRecord
from baton.v1 import worker_pb2, worker_pb2_grpc

ANSWER_S = 5.0


def drain(
    worker_id: str,
    redis: str | None,
    url: str,
    timeout_s: float,
    undo: bool,
    tls: TlsFolder | None = None,
) -> None:
    """Raises BatonError when the worker is unknown, does not answer or is still busy."""
    worker = find(worker_id, workers_of(redis, url))
    drained = asyncio.run(drain_worker(worker, timeout_s, undo, tls))
    if undo:
        said = "takes new requests again"
    elif drained:
        said = "has finished its requests and takes no new ones"
    else:
        raise BatonError(f"{worker_id} is still busy after {timeout_s:g} s; it goes on draining.")
    Console(highlight=False).print(f"{worker_id} {said}.")


def find(worker_id: str, workers: list[WorkerRecord]) -> WorkerRecord:
    for worker in workers:
        if worker.worker_id == worker_id:
            return worker
    known = ", ".join(sorted(worker.worker_id for worker in workers)) or "none"
    raise BatonError(f"There is no worker {worker_id}. Live workers: {known}.")


async def drain_worker(
    worker: WorkerRecord, timeout_s: float, undo: bool = False, tls: TlsFolder | None = None
) -> bool:
    """Whether it has nothing left, after `timeout_s` at most. Raises BatonError."""
    request = worker_pb2.DrainRequest(timeout_s=timeout_s, undo=undo)
    async with open_channel(worker.address, tls) as channel:
        try:
            stub = worker_pb2_grpc.WorkerStub(channel)
            return bool((await stub.Drain(request, timeout=timeout_s + ANSWER_S)).drained)
        except grpc.aio.AioRpcError as error:
            raise BatonError(
                f"{worker.worker_id} does not answer at {worker.address}: {error.details()}"
            ) from error
