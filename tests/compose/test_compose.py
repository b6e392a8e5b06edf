"""docker-compose.yml on a real Docker Engine: the images as they are built, the cluster as users
start it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
import pytest_asyncio

from baton.engine.ops.cpu.build import VARIANTS
from tests.compose.asking import COMPLETIONS, STREAM, ask, workers
from tests.compose.conftest import Golden
from tests.support.answers import Answer, gather_events
from tests.support.compose import (
    Compose,
    cut,
    docker,
    eventually,
    join,
    kill,
    pause,
    stay,
    unpause,
)

pytestmark = [
    pytest.mark.compose,
    pytest.mark.timeout(2400),
    pytest.mark.asyncio(loop_scope="module"),
]

HEAL_S = 180.0
CLIENTS = 6
LONG = STREAM | {"max_tokens": 240}
"""Nobody is fast enough to end it before a container is lost."""


@pytest_asyncio.fixture(loop_scope="module")
async def client(compose: Compose) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=compose.url, timeout=120, limits=limits) as client:
        yield client


def in_container(container: str, code: str) -> str:
    return docker("exec", container, "python", "-c", code).strip()


# --- images -----------------------------------------------------------------------------------


async def test_the_router_image_has_no_torch_and_the_worker_image_no_compiler(
    compose: Compose,
) -> None:
    (router,), worker = compose.containers("router"), compose.containers("decode")[0]
    look = "import importlib.util as u, shutil as s; print([bool(u.find_spec(m)) for m in "
    look += "('torch', 'numpy')], s.which('g++'), s.which('cc'), bool(u.find_spec('setuptools')))"
    assert in_container(router, look) == "[False, False] None None False"
    assert in_container(worker, look) == "[True, True] None None False"


async def test_the_worker_image_brings_the_kernels_of_every_variant(compose: Compose) -> None:
    code = "from baton.engine.ops.cpu.build import *; import json; "
    code += "print(json.dumps([str(library(v)) for v in VARIANTS]))"
    found = json.loads(in_container(compose.containers("prefill")[0], code))
    assert len(found) == len(VARIANTS)
    assert all(path.startswith("/opt/baton/") for path in found)


async def test_containers_run_without_root_on_a_root_file_system_that_cannot_be_written(
    compose: Compose,
) -> None:
    for service in ("redis", "router", "prefill", "decode"):
        for container in compose.containers(service):
            found = json.loads(docker("inspect", container))[0]
            host = found["HostConfig"]
            assert found["Config"]["User"].split(":")[0] not in ("", "0", "root"), service
            assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"], service
            assert host["Memory"] > 0 and host["PidsLimit"] > 0, service
            assert host["RestartPolicy"]["Name"] == "unless-stopped", service
            published = {
                p: where for p, where in found["NetworkSettings"]["Ports"].items() if where
            }
            assert set(published) == ({"8000/tcp"} if service == "router" else set())


async def test_redis_answers_nobody_without_the_password(compose: Compose) -> None:
    code = "import redis; print(redis.Redis('redis').ping())"
    with pytest.raises(AssertionError, match="AuthenticationError"):
        in_container(compose.containers("router")[0], code)


# --- answers ----------------------------------------------------------------------------------


async def test_golden_prompts_give_the_tokens_of_the_offline_engine(
    client: httpx.AsyncClient, golden: Golden
) -> None:
    for prompt, wanted in golden.cases:
        golden.check(await ask(client, prompt.path, **prompt.body, max_tokens=16), wanted)


async def test_kv_travels_between_containers_by_torch_distributed(
    client: httpx.AsyncClient,
) -> None:
    """Each has process ids of its own, so there is no memory to map; gRPC would be the fallback."""
    await ask(client, max_tokens=2)
    links = [link for record in await workers(client, "prefill") for link in record["links"]]
    assert "torch:gloo" in {link["transport"] for link in links}
    assert not [link for link in links if link["degraded"]]


# --- failures ---------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(compose: Compose) -> Answer:
    """What nothing disturbs."""
    async with httpx.AsyncClient(base_url=compose.url, timeout=120) as client:
        return await ask(client, **LONG)


def is_begin(answer: Answer, expected: Answer) -> bool:
    return answer.tokens == [expected.tokens[0][: STREAM["max_tokens"]]]


@pytest.mark.parametrize(
    ("fault", "heal"), [(kill, stay), (pause, unpause), (cut, join)], ids=["kill", "pause", "cut"]
)
async def test_a_stream_goes_on_when_the_container_that_decodes_it_is_lost(
    compose: Compose,
    client: httpx.AsyncClient,
    expected: Answer,
    fault: Callable[[str], None],
    heal: Callable[[str], None],
) -> None:
    containers = compose.containers("decode")
    losing: list[asyncio.Task[str]] = []
    async with client.stream("POST", COMPLETIONS, json=LONG) as response:
        assert response.status_code == 200, await response.aread()
        lines: list[str] = []
        async for line in response.aiter_lines():
            lines.append(line)
            if not losing and len(lines) == 16:
                losing.append(asyncio.create_task(_lose(client, containers, fault)))
    assert losing[0].done(), "it ended before the loss"
    await asyncio.to_thread(heal, losing[0].result())
    answer = await gather_events(httpx.Response(200, content="\n".join(lines).encode()))
    assert answer.tokens == expected.tokens and answer.counts == expected.counts
    await eventually(lambda: compose.healthy("decode", 2), HEAL_S)
    await _until_known(client, 2)


async def _lose(
    client: httpx.AsyncClient, containers: list[str], fault: Callable[[str], None]
) -> str:
    """The one that decodes, once the router has heard of it."""
    busy: list[str] = []

    async def found() -> bool:
        records = await workers(client, "decode")
        busy[:] = [r["address"].partition(":")[0] for r in records if r["load"]["running"]]
        return len(busy) == 1

    await eventually(found, HEAL_S)
    (container,) = [c for c in containers if c.startswith(busy[0])]
    await asyncio.to_thread(fault, container)
    return container


async def _until_known(client: httpx.AsyncClient, count: int) -> None:
    """As many decode workers as were asked for, none of them draining."""

    async def known() -> bool:
        records = await workers(client, "decode")
        return len(records) == count and not any(r["load"]["draining"] for r in records)

    await eventually(known, HEAL_S)


# --- scaling ----------------------------------------------------------------------------------


async def test_decode_scales_from_two_to_four_to_one_under_load_and_no_request_fails(
    compose: Compose, client: httpx.AsyncClient, expected: Answer
) -> None:
    resting = asyncio.Event()

    async def keep_asking() -> list[Answer]:
        answers = []
        while not resting.is_set():
            answers.append(await ask(client))
        return answers

    async def scale(count: int) -> None:
        await asyncio.to_thread(compose.up, "--no-recreate", "--scale", f"decode={count}")
        await _until_known(client, count)

    async def all_are_used() -> bool:
        """Each has been handed something."""
        links = [link for record in await workers(client, "prefill") for link in record["links"]]
        used = {link["peer"] for link in links}
        return used >= {record["address"] for record in await workers(client, "decode")}

    async def scale_twice() -> list[Answer]:
        await scale(4)
        await eventually(all_are_used, HEAL_S)
        await scale(1)
        resting.set()
        return []

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(keep_asking()) for _ in range(CLIENTS)]
        tasks.append(group.create_task(scale_twice()))
    answers = [answer for task in tasks for answer in task.result()]
    assert len(answers) >= CLIENTS
    assert all(is_begin(answer, expected) for answer in answers)


# --- the end ----------------------------------------------------------------------------------


async def test_two_workers_that_meet_an_empty_store_convert_the_model_once(
    compose: Compose,
) -> None:
    """They did when this cluster started; the model is whole and there is one of it."""
    worker = compose.containers("prefill")[0]
    assert "smollm2" in docker("exec", worker, "baton", "model", "verify", "smollm2")
    assert docker("exec", worker, "ls", "/var/lib/baton/models").split() == ["smollm2"]


async def test_a_stop_lets_a_stream_end_and_every_process_leave_in_order(
    compose: Compose, client: httpx.AsyncClient, expected: Answer
) -> None:
    everything = [
        c for s in ("redis", "prefill", "decode", "router") for c in compose.containers(s)
    ]
    async with client.stream("POST", COMPLETIONS, json=STREAM) as response:
        lines = response.aiter_lines()
        seen = [await anext(lines) for _ in range(8)]
        stopping = asyncio.create_task(asyncio.to_thread(compose, "stop", "decode"))
        seen += [line async for line in lines]
    await stopping
    answer = await gather_events(httpx.Response(200, content="\n".join(seen).encode()))
    assert is_begin(answer, expected)
    await asyncio.to_thread(compose, "stop")
    states = {container: compose.state(container) for container in everything}
    assert {state["ExitCode"] for state in states.values()} == {0}, states
