"""The profile tls on a real engine: the same answers, encrypted, and strangers get none."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from router.access.keys import ApiKey, hash_of, new_key
from tests.compose.asking import COMPLETIONS, STREAM, ask
from tests.compose.conftest import Golden
from tests.support.compose import Compose, docker, eventually

pytestmark = [
    pytest.mark.compose,
    pytest.mark.timeout(2400),
    pytest.mark.asyncio(loop_scope="module"),
]

KEY = new_key()


@pytest.fixture(scope="module")
def secure(compose: Compose) -> Iterator[Compose]:
    """The same cluster, started anew with the profile."""
    entry = ApiKey(name="ops", sha256=hash_of(KEY), tenant="ops", admin=True)
    settings = {"TLS": "https", "COMPOSE_PROFILES": "tls", "API_KEYS": entry.line()}
    secure = compose.changed(**settings)
    secure.up()
    yield secure
    secure("down", "--volumes", "--timeout", "45")


@pytest_asyncio.fixture(loop_scope="module")
async def client(secure: Compose, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    secure("cp", "router:/etc/baton/certs/ca.crt", str(tmp_path))
    trust = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    url = secure.url.replace("http://", "https://")
    async with httpx.AsyncClient(base_url=url, timeout=120, verify=trust) as client:
        yield client


async def test_answers_are_those_of_the_offline_engine_and_kv_travels_encrypted(
    client: httpx.AsyncClient, golden: Golden
) -> None:
    client.headers["authorization"] = f"Bearer {KEY}"
    prompt, wanted = golden.cases[0]
    golden.check(await ask(client, prompt.path, **prompt.body, max_tokens=16), wanted)

    async def links() -> list[dict[str, Any]]:
        records = (await client.get("/workers")).json()["workers"]
        assert {record["role"] for record in records} == {"prefill", "decode"}
        return [link for record in records for link in record["links"]]

    async def known() -> bool:
        return bool(await links())

    await eventually(known, 30)  # with the next announcement
    assert {link["transport"] for link in await links()} == {"grpc"}
    assert not [link for link in await links() if link["degraded"]]


async def test_without_a_key_there_is_no_answer(client: httpx.AsyncClient) -> None:
    assert (await client.post(COMPLETIONS, json=STREAM)).status_code == 401
    assert (await client.get("/health")).status_code == 200


async def test_a_container_of_the_network_without_a_certificate_reaches_no_worker(
    secure: Compose,
) -> None:
    (router,) = secure.containers("router")
    for service in ("prefill", "decode"):
        probe = ["python", "-m", "baton.cluster.probe", f"grpc://{service}:7000"]
        with_it = await asyncio.to_thread(docker, "exec", router, *probe)
        assert "healthy" in with_it
        with pytest.raises(AssertionError):  # docker() tells of an exit code that is not 0
            await asyncio.to_thread(docker, "exec", "-e", "BATON_TLS_DIR=", router, *probe)


async def test_redis_speaks_tls_only_and_shows_a_certificate_of_the_cluster(
    secure: Compose,
) -> None:
    (router,) = secure.containers("router")
    ping = "import os, redis; u = os.environ['BATON_REDIS_URL']; "
    ping += "print(redis.Redis.from_url({}).ping())"
    assert docker("exec", router, "python", "-c", ping.format("u")).strip() == "True"
    for wrong in ("u.replace('rediss:', 'redis:').partition('?')[0]", "u.partition('?')[0]"):
        with pytest.raises(AssertionError, match=r"exceptions\.ConnectionError"):
            docker("exec", router, "python", "-c", ping.format(wrong))


async def test_keys_are_readable_by_their_user_only(secure: Compose) -> None:
    (certs,) = secure.containers("certs")
    modes = docker("exec", certs, "sh", "-c", "stat -c %a /etc/baton/certs/*/tls.key").split()
    assert len(modes) == 6 and set(modes) == {"600"}
    assert docker("exec", certs, "stat", "-c", "%a", "/etc/baton/authority").strip() == "700"
