"""`baton role`: a worker finishes what it has, then does the other half of the work.

Its process goes on, with the weights it has loaded, under the same id and a new incarnation.
"""

import asyncio
import time

import grpc
from rich.console import Console

from baton.cli.drain import ANSWER_S, find
from baton.cli.status import workers_of
from baton.cluster.errors import BatonError
from baton.cluster.rpc import open_channel
from baton.cluster.tls import TlsFolder
from baton.cluster.workers import Role, WorkerRecord
from baton.v1 import worker_pb2, worker_pb2_grpc

BACK_WITHIN_S = 60.0
POLL_S = 0.1
_ROLES = {Role.PREFILL: worker_pb2.ROLE_PREFILL, Role.DECODE: worker_pb2.ROLE_DECODE}


def change_role(
    worker_id: str,
    role: Role,
    redis: str | None,
    url: str,
    timeout_s: float,
    tls: TlsFolder | None = None,
) -> None:
    """Raises BatonError when the worker is unknown, refuses, or is not back in its new role."""
    worker = find(worker_id, workers_of(redis, url))
    say = Console(highlight=False).print
    if worker.role is role:
        say(f"{worker_id} is a {role} worker already.")
        return
    if not asyncio.run(_ask(worker, role, timeout_s, tls)):
        say(f"{worker_id} was still busy after {timeout_s:g} s; its requests go on elsewhere.")
    _wait_for(worker, role, redis, url)
    say(f"{worker_id} is a {role} worker now.")


async def _ask(worker: WorkerRecord, role: Role, timeout_s: float, tls: TlsFolder | None) -> bool:
    """Whether it had nothing left. Raises BatonError."""
    request = worker_pb2.ChangeRoleRequest(role=_ROLES[role], timeout_s=timeout_s)
    async with open_channel(worker.address, tls) as channel:
        try:
            stub = worker_pb2_grpc.WorkerStub(channel)
            answer = await stub.ChangeRole(request, timeout=timeout_s + ANSWER_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise BatonError(f"{worker.worker_id} stays: {error.details()}.") from error
            raise BatonError(
                f"{worker.worker_id} does not answer at {worker.address}: {error.details()}"
            ) from error
    return bool(answer.drained)


def _wait_for(worker: WorkerRecord, role: Role, redis: str | None, url: str) -> None:
    """Until its next life is announced."""
    deadline = time.monotonic() + BACK_WITHIN_S
    while time.monotonic() < deadline:
        for found in workers_of(redis, url):
            if found.worker_id == worker.worker_id and found.incarnation != worker.incarnation:
                if found.role is role:
                    return
                raise BatonError(f"{worker.worker_id} could not change; its log says why.")
        time.sleep(POLL_S)
    raise BatonError(
        f"{worker.worker_id} is not back after {BACK_WITHIN_S:g} s; its log says what it does."
    )
