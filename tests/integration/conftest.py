"""Models for tests of whole clusters, what they answer offline, and a Redis of their own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.cluster.redis_server import EmbeddedRedis
from baton.store import StoredModel, resolve
from tests.golden.oracle import Oracle
from tests.support.tiny_chat import write_tiny_chat


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    path: Path = tmp_path_factory.mktemp("tiny-chat")
    return write_tiny_chat(path)


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """The real model in fp32, offline."""
    return Oracle(resolve("smollm2", progress=False))


@pytest.fixture
async def redis_server() -> AsyncIterator[tuple[EmbeddedRedis, str]]:
    server = EmbeddedRedis()
    yield server, await server.start()
    await server.stop()
