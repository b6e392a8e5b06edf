"""Pools grow under load and shrink after it, and no request notices."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from baton.store import StoredModel
from tests.support.answers import Answer
from tests.support.ray_nodes import BatonOnRay, RayNodes, baton_on_ray, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

CLIENTS = 12
DECODES = ("decode-0", "decode-1", "decode-2")
GROWN_S = 240.0
STORY: dict[str, Any] = {
    "prompt": "A letter to the harbour master about the weather of last week: " * 2,
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 0,
    "logprobs": 0,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def baton(nodes: RayNodes, tiny_chat: StoredModel) -> AsyncIterator[BatonOnRay]:
    """Three requests fill a decode worker."""
    bounds = {"prefill": 1, "decode": 1, "max_decode": 3, "scale_down_after_s": 3}
    async with baton_on_ray(model=str(tiny_chat.path), max_num_seqs=3, **bounds) as baton:
        yield baton


def counts(baton: BatonOnRay, role: str) -> list[int]:
    """What the pool was set to, in order."""
    found = [re.search(rf"baton: {role} workers: \d+ → (\d+)", line) for line in baton.said]
    return [int(match[1]) for match in found if match]


async def under_load(baton: BatonOnRay, *grown_to: str) -> list[Answer]:
    """The answers of clients that ask until decode has grown so far."""
    grown = asyncio.Event()

    async def client() -> list[Answer]:
        answers = []
        while not grown.is_set():
            answers.append(await baton.ask(**STORY))
        return answers

    async def wait_grown() -> list[Answer]:
        async def check() -> None:
            assert await baton.names("decode") >= set(grown_to), baton.said[-5:]

        await until(check, GROWN_S)
        grown.set()
        return []

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client()) for _ in range(CLIENTS)]
        tasks.append(group.create_task(wait_grown()))
    return [answer for task in tasks for answer in task.result()]


async def test_decode_grows_under_load_shrinks_after_it_and_every_answer_is_the_same(
    baton: BatonOnRay,
) -> None:
    expected = await baton.ask(**STORY)
    answers = await under_load(baton, *DECODES)
    nodes = {baton.place(name).node_id for name in DECODES}
    assert len(nodes) > 1
    while await baton.names("decode") != {"decode-0"}:  # one at a time while it shrinks
        answers.append(await baton.ask(**STORY))
    assert len(answers) >= CLIENTS
    assert all(answer.tokens == expected.tokens for answer in answers)
    course = counts(baton, "decode")
    up = course.index(3)
    assert course[: up + 1] == sorted(course[: up + 1])
    assert course[up + 1 :] == [2, 1], "it went up and down"
    assert not baton.restarts
    await baton.wait_workers("prefill-0", "decode-0")
    await baton.wait_at_rest()


async def test_what_has_left_gives_its_place_back_and_may_come_again(baton: BatonOnRay) -> None:
    async def gone() -> None:
        assert set(baton.placer.children) == {"router", "prefill-0", "decode-0"}

    await until(gone, 30)
    assert await under_load(baton, *DECODES[:2])
    assert not baton.restarts
