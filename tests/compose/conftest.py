"""The cluster of docker-compose.yml, built and started once."""

from collections.abc import Iterator

import pytest
import torch

from baton.engine.ops.attention import reads_in_place
from tests.support.compose import BUILD_TIMEOUT_S, Compose

KV_MEMORY = "64MiB"


@pytest.fixture(scope="session")
def dtype() -> str:
    """What is exact on this machine: bf16 is with our own kernels, and fp32 always."""
    return "bfloat16" if reads_in_place(torch.bfloat16, 64, None) else "float32"


@pytest.fixture(scope="session")
def compose(dtype: str) -> Iterator[Compose]:
    # Every prompt is handed off as long as a prefill worker lives.
    compose = Compose(DTYPE=dtype, KV_MEMORY=KV_MEMORY, DECODE_PREFILLS="fallback")
    compose("down", "--volumes", "--remove-orphans")
    try:
        compose("build", timeout_s=BUILD_TIMEOUT_S)
        compose("up", "--detach", "--wait", "--wait-timeout", "300", timeout_s=330)
        yield compose
    finally:
        compose("down", "--volumes", "--timeout", "45")
