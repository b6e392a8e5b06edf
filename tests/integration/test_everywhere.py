"""Whichever router is asked, it answers for all of them: two gateways on one real Redis."""

import asyncio
import re
import secrets
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from baton.cli.report.sources import Question, load
from baton.cluster.bus import Bus
from baton.cluster.redis_link import RedisLink
from baton.cluster.redis_server import EmbeddedRedis
from baton.cluster.reports import Filters
from baton.cluster.reports.window import Slot
from router import reports_api
from router.text import TextModel
from tests.support.byte_model import byte_model
from tests.support.gateway import COMPLETIONS, RunningGateway, running_gateway
from tests.support.redis import until_equal
from tests.support.stub_workers import scripted

Routers = tuple[RunningGateway, RunningGateway]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return byte_model(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture
async def redis() -> AsyncIterator[tuple[EmbeddedRedis, str]]:
    server = EmbeddedRedis()
    yield server, await server.start()
    await server.stop()


@pytest.fixture
async def routers(model: TextModel, redis: tuple[EmbeddedRedis, str]) -> AsyncIterator[Routers]:
    """The first has served `a`, the second `b` and `c`; each has its own workers."""
    async with AsyncExitStack() as stack:
        one, two = [
            await stack.enter_async_context(
                running_gateway(model, scripted("ok"), redis_url=redis[1])
            )
            for _ in range(2)
        ]
        for router, name in ((one, "a"), (two, "b"), (two, "c")):
            body = {"prompt": name, "max_tokens": 2}
            await router.post(COMPLETIONS, body, headers={"x-request-id": name})
        yield one, two


async def get(router: RunningGateway, path: str) -> Any:
    return (await router.client.get(path)).json()


async def test_reports_and_requests_of_either_router_are_those_of_both(routers: Routers) -> None:
    for asked in routers:
        await until_equal(lambda asked=asked: counted(asked), (3, 2, []))  # type: ignore[misc]
        listed = await get(asked, "/v1/requests?limit=2")
        assert [row["id"] for row in listed["data"]] == ["c", "b"] and not listed["missing"]
        for name in ("a", "b"):
            assert (await get(asked, f"/v1/requests/{name}"))["timing"]["phases"]
        assert (await asked.client.get("/v1/requests/nobody")).status_code == 404


async def test_slots_are_made_and_read_beside_the_event_loop(
    routers: Routers, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[int]] = {"as_json": set(), "from_json": set(), "merge": set()}

    def watch(name: str, made: Any) -> Any:
        def watched(*arguments: Any) -> Any:
            threads[name].add(threading.get_ident())
            return made(*arguments)

        return watched

    monkeypatch.setattr(Slot, "as_json", watch("as_json", Slot.as_json))
    monkeypatch.setattr(Slot, "from_json", staticmethod(watch("from_json", Slot.from_json)))
    monkeypatch.setattr(reports_api, "merged", watch("merge", reports_api.merged))
    await until_equal(lambda: counted(routers[0]), (3, 2, []))
    assert all(threads.values())
    assert threading.get_ident() not in set.union(*threads.values())


async def counted(router: RunningGateway) -> tuple[int, int, list[str]]:
    report = await get(router, "/v1/reports")
    return report["requests"], report["routers"], report["missing"]


async def test_a_router_that_is_named_twice_counts_once(routers: Routers) -> None:
    await until_equal(lambda: counted(routers[0]), (3, 2, []))
    urls = [router.url for router in routers]
    report = await asyncio.to_thread(load, urls, Question(3600, Filters()))
    assert (report["requests"], report["routers"], report["missing"]) == (3, 2, [])


async def test_without_redis_a_router_answers_for_itself_and_says_so(
    routers: Routers, redis: tuple[EmbeddedRedis, str]
) -> None:
    await until_equal(lambda: counted(routers[0]), (3, 2, []))
    await redis[0].stop()
    requests, answered, missing = await counted(routers[0])
    assert (requests, answered) == (1, 1)
    assert len(missing) == 1 and missing[0].startswith("other routers: Redis is not available")
    assert (await get(routers[0], "/v1/requests/a"))["id"] == "a"
    not_found = await get(routers[0], "/v1/requests/b")
    assert "Not asked: other routers" in not_found["error"]["message"]


async def test_a_router_that_does_not_answer_or_answers_too_much_is_named(
    redis: tuple[EmbeddedRedis, str],
) -> None:
    link = RedisLink(redis[1])
    await link.start()
    answers = {"large": lambda _: secrets.token_hex(9 << 19), "well": lambda question: question}
    buses = [await bus(link, name, answer, []) for name, answer in answers.items()]
    patient = await bus(link, "patient", lambda _: None, ["large", "well"], 30.0)
    hasty = await bus(link, "hasty", lambda _: None, ["gone"], 0.2)
    try:
        told = await patient.ask({"to": "all"})
        assert told.answers["well"] == {"to": "all"} and "large" not in told.answers
        assert len(told.missing) == 1
        assert re.fullmatch(r"router large: its answer of \d+ MiB is too large", told.missing[0])
        assert "router gone: no answer within 0.2 s" in (await hasty.ask(None)).missing
    finally:
        for each in (*buses, patient, hasty):
            await each.stop()
        await link.close()


async def test_what_is_no_message_is_told_and_the_next_question_is_answered(
    redis: tuple[EmbeddedRedis, str], caplog: pytest.LogCaptureFixture
) -> None:
    link = RedisLink(redis[1])
    await link.start()
    asker = await bus(link, "asker", lambda _: None, ["well"], 30.0)
    buses = [asker, await bus(link, "well", lambda question: question, [])]
    try:
        for data in (b"", b"{}\n", b"[1]", b'{"name": 1, "from": "x", "problem": null}\nx'):
            for channel in ("{baton}:asked", "{baton}:told:asker"):
                await link.client.publish(channel, data)
        assert (await asker.ask("still there?")).answers == {"well": "still there?"}
        assert "is no message of a router" in caplog.text
    finally:
        for each in buses:
            await each.stop()
        await link.close()


async def bus(
    link: RedisLink, name: str, answer: Any, others: list[str], deadline_s: float = 1.0
) -> Bus:
    """Subscribed, so that it hears what is asked."""

    async def live() -> list[str]:
        return others

    async def answering(question: Any) -> Any:
        return answer(question)

    made = Bus(link, name, live, deadline_s=deadline_s)
    made.answer = answering
    await made.start()
    channel = f"{{baton}}:told:{name}".encode()

    async def subscribed() -> int:
        return int(dict(await link.client.pubsub_numsub(channel))[channel])

    await until_equal(subscribed, 1)
    return made
