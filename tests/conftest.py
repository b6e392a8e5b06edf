"""Fixtures that more than one kind of test uses."""

import os
from pathlib import Path

# Tests start processes beside gRPC servers of their own. gRPC's fork handlers would run between
# fork and exec, and now and then one of them ends the child there.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"

import pytest

from tests.support.tiny import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
