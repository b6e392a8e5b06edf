"""`baton role`: a worker finishes what it has, and goes on in the other role with its weights."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from baton.cli.main import main
from baton.cluster.redis_client import close, connect
from baton.cluster.workers import Role
from baton.store import StoredModel
from tests.support.cluster import COMPLETIONS, Cluster, ClusterWorker, running_cluster
from tests.support.redis import eventually, until

LONG = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "temperature": 0}


@pytest.fixture
async def cluster(tiny_chat: StoredModel) -> AsyncIterator[Cluster]:
    async with running_cluster(tiny_chat, decodes=2) as cluster:
        await cluster.learn_the_usual()
        yield cluster


async def command(cluster: Cluster, *words: str) -> object:
    """Its exit code. On a thread: as another process it would have an event loop of its own."""

    def run() -> object:
        try:
            main(["role", *words, "--redis", cluster.redis_url])
        except SystemExit as end:
            return end.code or 0

    return await asyncio.to_thread(run)


def role_of(cluster: Cluster, worker_id: str) -> Role:
    """As the router has it."""
    records = cluster.gateway.directory.snapshot()
    return next(record.role for record in records if record.worker_id == worker_id)


async def busy_decode(cluster: Cluster) -> tuple[ClusterWorker, str]:
    await eventually(lambda: any(d.scheduler.running for d in cluster.decodes))
    worker = next(d for d in cluster.decodes if d.scheduler.running)
    return worker, worker.settings.worker_id


def pace(worker: ClusterWorker, full_speed: threading.Event) -> None:
    """Makes it slow until then."""
    runner = worker.parts.engine._runner
    compute = runner.run

    def run(batch: Any) -> Any:
        full_speed.wait(0.2)
        return compute(batch)

    runner.run = run


async def until_lives(
    cluster: Cluster, worker_id: str, wanted: Callable[[list[str]], bool]
) -> None:
    """Waits until the incarnations of it that the prefix index knows are as wanted."""

    async def known() -> bool:
        keys = [key.decode() async for key in client.scan_iter(f"*:held:{worker_id}:*")]
        return wanted([key.rpartition(":")[2] for key in keys])

    client = connect(cluster.redis_url)
    try:
        await until(known)
    finally:
        await close(client)


async def test_a_worker_finishes_its_streams_and_then_does_its_new_part_with_the_same_weights(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = asyncio.create_task(cluster.ask(COMPLETIONS, stream=True, **LONG))
    worker, name = await busy_decode(cluster)
    weights, before = worker.parts.loaded, (await cluster.info(worker)).incarnation
    await until_lives(cluster, name, lambda lives: lives == [before])
    assert await command(cluster, name, "prefill") == 0
    assert capsys.readouterr().out == f"{name} is a prefill worker now.\n"
    assert worker.parts.loaded is weights, "nothing is loaded again"
    assert (await stream).usage["completion_tokens"] == 300
    await eventually(lambda: role_of(cluster, name) is Role.PREFILL)
    assert (await cluster.info(worker)).incarnation > before
    await until_lives(cluster, name, lambda lives: before not in lives)

    # The other way round too: now all prompts are this worker's.
    assert await command(cluster, cluster.prefills[0].settings.worker_id, "decode") == 0
    assert cluster.prefills == [worker] and len(cluster.decodes) == 2
    await cluster.assert_unharmed()
    assert (await cluster.totals([worker])).handoffs >= 1
    assert await command(cluster, name, "prefill") == 0
    assert "is a prefill worker already" in capsys.readouterr().out


async def test_what_a_change_of_role_cuts_off_goes_on_elsewhere_from_its_last_token(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.worker.lifecycle.STOP_GRACE_S", 0.0)
    expected = (await cluster.ask(COMPLETIONS, **LONG)).text
    full_speed = threading.Event()
    for decode in cluster.decodes:
        pace(decode, full_speed)
    stream = asyncio.create_task(cluster.ask(COMPLETIONS, stream=True, **LONG))
    worker, name = await busy_decode(cluster)
    assert await command(cluster, name, "prefill", "--timeout", "0") == 0
    assert "still busy after 0 s; its requests go on elsewhere" in capsys.readouterr().out
    full_speed.set()
    answer = await stream
    assert answer.text == expected and answer.usage["completion_tokens"] == 300
    metrics = (await cluster.client.get("/metrics")).text
    assert 'baton_retries_total{reason="continued"} 1' in metrics
    assert cluster.prefills[-1] is worker
    await cluster.assert_unharmed()


async def test_an_unknown_worker_or_role_is_a_sentence(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await command(cluster, "decode-9", "prefill") == 1
    assert "no worker decode-9. Live workers: decode-0, decode-1" in capsys.readouterr().err
    assert await command(cluster, "decode-0", "both") == 2
    assert "'both' is not one of" in capsys.readouterr().err
