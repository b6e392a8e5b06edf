"""The real model and what it answers offline."""

import pytest

from baton.store import StoredModel, resolve
from tests.golden.oracle import Oracle
from tests.golden.prompts import GoldenPrompt, golden_prompts


@pytest.fixture(scope="session")
def smollm2() -> StoredModel:
    return resolve("smollm2", progress=False)


@pytest.fixture(scope="session")
def oracle(smollm2: StoredModel) -> Oracle:
    return Oracle(smollm2)


@pytest.fixture(scope="session")
def prompts(oracle: Oracle) -> list[GoldenPrompt]:
    return golden_prompts(oracle.tokenizer.encode)
