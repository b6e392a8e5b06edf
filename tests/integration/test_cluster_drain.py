"""`baton drain`: what runs is finished, nothing new is taken, and the worker can be taken back."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from baton.cli.drain import drain
from baton.cluster.errors import BatonError
from baton.store import StoredModel
from tests.support.cluster import COMPLETIONS, ORDINARY, Cluster, running_cluster
from tests.support.redis import eventually


@pytest.fixture
async def cluster(tiny_chat: StoredModel) -> AsyncIterator[Cluster]:
    async with running_cluster(tiny_chat, decodes=2) as cluster:
        yield cluster


async def command(cluster: Cluster, worker_id: str, timeout_s: float = 30, **undo: bool) -> None:
    """As from the command line: another process would have an event loop of its own too."""
    undone = undo.get("undo", False)
    await asyncio.to_thread(drain, worker_id, cluster.redis_url, "", timeout_s, undone)


def draining(cluster: Cluster) -> set[str]:
    records = cluster.gateway.directory.snapshot()
    return {record.worker_id for record in records if record.load.draining}


async def test_a_drained_worker_finishes_its_streams_and_gets_no_more_until_taken_back(
    cluster: Cluster,
) -> None:
    busy, other = cluster.decodes
    body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    stream = asyncio.create_task(cluster.ask(COMPLETIONS, stream=True, **body))
    await eventually(lambda: any(d.scheduler.running for d in cluster.decodes))
    if not busy.scheduler.running:
        busy, other = other, busy
    name = busy.settings.worker_id
    with pytest.raises(BatonError, match="still busy after 0 s; it goes on draining"):
        await command(cluster, name, timeout_s=0)
    await eventually(lambda: draining(cluster) == {name})
    waiting = asyncio.create_task(command(cluster, name))
    before = (await cluster.totals([busy])).handoffs
    answers = [await cluster.ask(COMPLETIONS, **ORDINARY) for _ in range(4)]
    assert all(answer.text for answer in answers)
    assert len((await stream).text) > 0 and stream.result().usage["completion_tokens"] == 300
    await waiting
    assert (await cluster.totals([busy])).handoffs <= before + 1  # the stream's own
    assert (await cluster.totals([other])).handoffs >= 4
    busy.assert_books_at_baseline()

    await command(cluster, name, undo=True)
    await eventually(lambda: not draining(cluster))
    await command(cluster, other.settings.worker_id)
    await eventually(lambda: draining(cluster) == {other.settings.worker_id})
    await cluster.ask(COMPLETIONS, **ORDINARY)
    assert (await cluster.totals([busy])).handoffs >= before + 1


async def test_an_unknown_worker_is_a_sentence_with_the_known_ones(cluster: Cluster) -> None:
    with pytest.raises(BatonError, match=r"no worker decode-9\. Live workers: decode-0, decode-1"):
        await command(cluster, "decode-9")
