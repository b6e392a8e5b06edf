"""One cluster of real processes per transport, whole again before every test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from baton.store import StoredModel
from tests.support.chaos_cluster import ChaosCluster, chaos_cluster
from tests.support.hosts import Network, namespaces_allowed
from tests.support.tiny_chat import write_tiny_chat

TRANSPORTS = ["shm", "torch", "grpc"]


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    path: Path = tmp_path_factory.mktemp("tiny-chat")
    return write_tiny_chat(path)


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=TRANSPORTS)
async def processes(
    request: pytest.FixtureRequest,
    tiny_chat: StoredModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[ChaosCluster]:
    """Two prefill and two decode workers and a router, each on a host of its own."""
    folder = tmp_path_factory.mktemp(f"chaos-{request.param}")
    with Network(apart=namespaces_allowed()) as network:
        # A transport that failed in one test is to be used again in the next.
        settings = {"workers": {"transport": request.param}, "prefill": {"transport_retry_s": 0.1}}
        async with chaos_cluster(tiny_chat.path, folder, network, **settings) as cluster:
            cluster.transport = {"torch": "torch:gloo"}.get(request.param, request.param)
            yield cluster


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(processes: ChaosCluster) -> AsyncIterator[ChaosCluster]:
    await processes.restore()
    yield processes
    processes.faults.disarm()
