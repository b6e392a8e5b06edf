"""Fixtures that more than one kind of test uses."""

from pathlib import Path

import pytest

from tests.support.tiny import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
