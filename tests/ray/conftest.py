"""Ray nodes, one cluster for all of these tests; the model, and Baton on three nodes."""

import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import ray

from baton.store import StoredModel
from tests.support.ray_nodes import BatonOnRay, RayNodes, baton_on_ray
from tests.support.tiny_chat import write_tiny_chat


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    path: Path = tmp_path_factory.mktemp("tiny-chat")
    return write_tiny_chat(path)


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("BATON_HOME", str(home))
        patch.setenv("BATON_SELF_PROFILE", "false")
        # A busy machine decides no test; what is killed here is noticed at once all the same.
        patch.setenv("BATON_QUEUE_TIMEOUT_S", "240")
        patch.setenv("BATON_PEER_TIMEOUT_S", "15")
        # With Ray's own, 15, they starve beside anything else.
        patch.setenv("RAY_worker_niceness", "0")
        # A job's entrypoint is a shell command.
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        nodes = RayNodes(3, home)
        nodes.connect()
        yield nodes
        ray.shutdown()
        nodes.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def baton(nodes: RayNodes, tiny_chat: StoredModel) -> AsyncIterator[BatonOnRay]:
    """Two pairs; one node is left over."""
    async with baton_on_ray(model=str(tiny_chat.path), prefill=2, decode=2) as baton:
        yield baton
