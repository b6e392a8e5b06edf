"""Who may use the gateway, how much, and what one tenant learns of another: nothing."""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import orjson
import pytest
import trustme

from baton.store import StoredModel
from router.serving import MAX_HEAD_BYTES
from router.text import TextModel
from tests.integration.test_gateway_requests import error_of
from tests.support.api_keys import Keys
from tests.support.byte_model import byte_model
from tests.support.cluster import Cluster, running_cluster
from tests.support.gateway import CHAT, COMPLETIONS, USER_HI, RunningGateway, running_gateway, until
from tests.support.stub_workers import scripted

ASK = {"model": "bytes", "messages": USER_HI, "max_tokens": 4}
PROMPT = list(range(20, 120))  # 6 full blocks of 16 and a rest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return byte_model(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(
        tmp_path / "keys.toml",
        alice={},
        bob={},
        root={"admin": True},
        hasty={"requests_per_minute": 2},
        wordy={"tokens_per_minute": 20},
    )


@pytest.fixture
async def gateway(model: TextModel, keys: Keys) -> AsyncIterator[RunningGateway]:
    async with running_gateway(model, scripted("abc"), api_keys_file=keys.path) as running:
        yield running


async def test_a_request_without_a_good_key_gets_401_as_openai_words_it(
    gateway: RunningGateway, keys: Keys
) -> None:
    wrong = [{}, {"authorization": "Bearer sk-guess"}, {"authorization": "Basic YTpi"}]
    for headers in [*wrong, {"authorization": "Bearer " + keys.secrets["alice"][:-1]}]:
        for method, path in [
            ("POST", CHAT), ("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/workers"),
            ("GET", "/metrics"), ("GET", "/v1/requests"), ("GET", "/v1/reports"), ("GET", "/no"),
        ]:  # fmt: skip
            response = await gateway.client.request(method, path, json=ASK, headers=headers)
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
            assert error_of(response)["code"] == "invalid_api_key"
    assert gateway.cluster.calls == 0
    for path in ("/health", "/health/live", "/dashboard", "/dashboard/app.js"):
        assert (await gateway.client.get(path)).status_code == 200


async def test_the_openai_client_works_with_a_key_and_not_without(
    gateway: RunningGateway, keys: Keys
) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key=keys.secrets["alice"]
    ) as client:
        answer = await client.chat.completions.create(**ASK)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == "abca"
        stream = await client.chat.completions.create(**ASK, stream=True)  # type: ignore[call-overload]
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(texts) == "abca"
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="sk-no") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_more_requests_than_allowed_get_429_with_the_time_to_wait(
    gateway: RunningGateway, keys: Keys
) -> None:
    statuses = []
    for _ in range(3):
        response = await gateway.post(CHAT, ASK, headers=keys.headers["hasty"])
        statuses.append(response.status_code)
    assert statuses == [200, 200, 429]
    error = error_of(response)
    assert error["code"] == "rate_limit_exceeded" and "2 requests per minute" in error["message"]
    assert 25 <= int(response.headers["retry-after"]) <= 30
    assert (await gateway.post(CHAT, ASK, headers=keys.headers["alice"])).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_prompts_and_answers_are_paid_for(
    gateway: RunningGateway, keys: Keys, stream: bool
) -> None:
    """A bucket of 20: 5 for the prompt, 40 for the answer, and nothing is left for a minute."""
    body = {"prompt": "12345", "max_tokens": 40, "stream": stream}
    first = await gateway.post(COMPLETIONS, body, headers=keys.headers["wordy"])
    assert first.status_code == 200
    second = await gateway.post(COMPLETIONS, body, headers=keys.headers["wordy"])
    assert second.status_code == 429
    assert "20 tokens per minute" in error_of(second)["message"]
    # 25 in debt and 5 to have: 30 tokens at 3 s each.
    assert 80 <= int(second.headers["retry-after"]) <= 90


async def test_a_prompt_that_no_worker_began_with_is_given_back(
    model: TextModel, keys: Keys
) -> None:
    """Whoever was refused for a full queue or late targets had paid for what nobody computed."""
    async with running_gateway(
        model, scripted("abc"), api_keys_file=keys.path, max_running=1, max_queue=1
    ) as gateway:
        (decode,) = gateway.cluster.decodes
        decode.behaviour.hang, decode.behaviour.fail_at = True, 2

        async def ask(name: str, **body: object) -> httpx.Response:
            whole = {"prompt": "x" * 20, "max_tokens": 4, **body}
            return await gateway.post(COMPLETIONS, whole, headers=keys.headers[name])

        others = [asyncio.create_task(ask("alice"))]
        await until(lambda: decode.counters.running == 1)
        others.append(asyncio.create_task(ask("alice")))
        await until(lambda: gateway.gateway.admission.waiting == 1)
        for _ in range(2):
            assert error_of(await ask("wordy"))["code"] == "queue_full"
        for other in others:
            other.cancel()
        await until(lambda: not gateway.gateway.admission.running)
        decode.behaviour.hang, decode.behaviour.capacity = False, 0
        impatient = await ask("wordy", slo={"ttft_ms": 0.001, "policy": "reject"})
        assert impatient.json()["error"]["code"] == "targets_unattainable"
        decode.behaviour.capacity = 64
        assert (await ask("wordy")).status_code == 200
        assert error_of(await ask("wordy"))["code"] == "rate_limit_exceeded"


async def test_a_cancelled_answer_is_paid_for_as_far_as_it_went(
    gateway: RunningGateway, keys: Keys
) -> None:
    gateway.cluster.decodes[0].behaviour.step_s = 0.005
    body = {"prompt": "12345", "max_tokens": 200, "stream": True}
    headers = keys.headers["wordy"]
    async with gateway.client.stream("POST", COMPLETIONS, json=body, headers=headers) as response:
        chunks = response.aiter_lines()
        for _ in range(80):
            await anext(chunks)
    await until(lambda: not gateway.gateway.admission.running)
    assert (await gateway.post(COMPLETIONS, body, headers=headers)).status_code == 429


async def test_a_key_speaks_for_its_own_tenant_only_and_an_admins_for_any(
    gateway: RunningGateway, keys: Keys
) -> None:
    async def status(name: str, tenant: str) -> int:
        headers = {**keys.headers[name], "x-baton-tenant": tenant}
        return (await gateway.post(CHAT, ASK, headers=headers)).status_code

    assert await status("alice", "alice") == 200
    assert await status("alice", "bob") == 403
    assert await status("root", "bob") == 200


async def test_a_tenant_reads_of_its_own_requests_only(gateway: RunningGateway, keys: Keys) -> None:
    for name in ("alice", "bob"):
        headers = {**keys.headers[name], "x-request-id": f"of-{name}"}
        assert (await gateway.post(CHAT, ASK, headers=headers)).status_code == 200

    async def get(name: str, path: str) -> httpx.Response:
        return await gateway.client.get(path, headers=keys.headers[name])

    async def listed(name: str) -> set[str]:
        return {row["id"] for row in (await get(name, "/v1/requests")).json()["data"]}

    assert await listed("alice") == {"of-alice"}
    assert await listed("root") == {"of-alice", "of-bob"}
    assert (await get("alice", "/v1/requests/of-bob")).status_code == 404
    assert (await get("bob", "/v1/requests/of-bob")).status_code == 200
    for name, count in (("alice", 1), ("root", 2)):
        report = (await get(name, "/v1/reports")).json()
        assert report["requests"] == count, report
        assert report["routers"] == 1
    assert (await get("alice", "/v1/reports?raw=true")).json()["routers"] == 1
    assert (await get("root", "/v1/reports?raw=true")).json()["routers"][0]["slots"]
    assert (await get("alice", "/v1/reports?tenant=bob")).status_code == 403
    for path in ("/workers", "/metrics"):
        assert (await get("alice", path)).status_code == 403
        assert (await get("root", path)).status_code == 200


async def test_a_tenant_that_takes_anothers_request_id_does_not_hide_that_request(
    gateway: RunningGateway, keys: Keys
) -> None:
    """The owner got 404: the newest request of an id was the only one that could be found."""
    for name in ("alice", "bob"):
        headers = {**keys.headers[name], "x-request-id": "same"}
        assert (await gateway.post(CHAT, ASK, headers=headers)).status_code == 200
    for name, tenant in (("alice", "alice"), ("bob", "bob"), ("root", "bob")):
        found = await gateway.client.get("/v1/requests/same", headers=keys.headers[name])
        assert found.json()["tenant"] == tenant
    stranger = await gateway.client.get("/v1/requests/same", headers=keys.headers["hasty"])
    assert stranger.status_code == 404


async def test_headers_without_end_get_431(gateway: RunningGateway, keys: Keys) -> None:
    async def answer(head: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head)
        async with asyncio.timeout(10):
            said = await reader.read()
        writer.close()
        return said

    def assert_refused(said: bytes, code: str) -> None:
        """Neither answer had the request id that every error carries."""
        head, _, body = said.partition(b"\r\n\r\n")
        error = orjson.loads(body)["error"]
        assert error["code"] == code
        assert error["request_id"] and f"x-request-id: {error['request_id']}".encode() in head

    start = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    huge = b"a" * (MAX_HEAD_BYTES + 1)
    for head in (
        start + b"x-large: " + huge + b"\r\n\r\n",
        start + b"x-endless: " + huge + huge,  # never ends
        start + b"".join(b"x-%d: y\r\n" % number for number in range(8000)),
        b"GET /" + huge + b" HTTP/1.1\r\n",
    ):
        said = await answer(head)
        assert said.startswith(b"HTTP/1.1 431 "), said[:200]
        assert_refused(said, "headers_too_large")
    said = await answer(b"nonsense\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert_refused(said, "invalid_http")
    fits = start + b"x-fits: " + b"a" * (MAX_HEAD_BYTES - 1000) + b"\r\nconnection: close\r\n\r\n"
    assert (await answer(fits)).startswith(b"HTTP/1.1 200 ")


async def test_a_long_body_is_not_counted_as_headers_of_the_next_request(
    gateway: RunningGateway, keys: Keys
) -> None:
    """The last piece of a body was once: the next request of its connection got 431."""
    body = b'{"model":"bytes","user":"' + b"y" * (4 * MAX_HEAD_BYTES) + b'"}'
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    head += f"authorization: {keys.headers['alice']['authorization']}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    async with asyncio.timeout(10):
        for _ in range(8):
            writer.write(head.encode() + body)
            status = await reader.readline()
            rest = await reader.readuntil(b"\r\n\r\n")
            (length,) = re.findall(rb"content-length: (\d+)", rest)
            assert status.startswith(b"HTTP/1.1 400 "), status
            assert b"prompt must not be empty" in await reader.readexactly(int(length))
        writer.write(b"GET /health HTTP/1.1\r\nconnection: close\r\nx-large: ")
        writer.write(b"a" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
    writer.close()


async def test_browsers_may_call_from_listed_origins_only(model: TextModel, keys: Keys) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}

    async def allowed(gateway: RunningGateway, origin: str) -> str | None:
        headers = {**asks, "origin": origin}
        response = await gateway.client.options(CHAT, headers=headers)
        return response.headers.get("access-control-allow-origin")

    async with running_gateway(model, scripted("a")) as closed:
        assert await allowed(closed, "https://app.example") is None
    listed = "https://app.example,http://localhost:3000"
    async with running_gateway(
        model, scripted("a"), cors_origins=listed, api_keys_file=keys.path
    ) as gateway:
        assert await allowed(gateway, "https://app.example") == "https://app.example"
        assert await allowed(gateway, "https://evil.example") is None
        headers = {**keys.headers["alice"], "origin": "https://app.example"}
        answered = await gateway.post(CHAT, ASK, headers=headers)
        assert answered.headers["access-control-allow-origin"] == "https://app.example"
        assert "access-control-allow-credentials" not in answered.headers
        refused = await gateway.post(CHAT, ASK, headers={"origin": "https://app.example"})
        assert refused.status_code == 401  # and the page may read why
        assert refused.headers["access-control-allow-origin"] == "https://app.example"


async def test_the_gateway_speaks_https_and_follows_its_certificate(
    model: TextModel, tmp_path: Path
) -> None:
    certfile, keyfile = tmp_path / "cert.pem", tmp_path / "key.pem"

    def issue() -> trustme.CA:
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(str(keyfile))
        issued.cert_chain_pems[0].write_to_path(str(certfile))
        return authority

    async def asks(gateway: RunningGateway, authority: trustme.CA) -> int:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        async with httpx.AsyncClient(verify=context, trust_env=False) as client:
            url = f"https://127.0.0.1:{gateway.port}{CHAT}"
            return (await client.post(url, json=ASK)).status_code

    first = issue()
    async with running_gateway(
        model, scripted("a"), ssl_certfile=certfile, ssl_keyfile=keyfile
    ) as gateway:
        assert await asks(gateway, first) == 200
        with pytest.raises(httpx.HTTPError):
            await gateway.client.get("/health")  # plaintext
        second = issue()
        assert await asks(gateway, second) == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await asks(gateway, first)
        keyfile.write_text("half written")
        assert await asks(gateway, second) == 200


async def test_no_tenant_hits_anothers_cache_unless_they_share_a_group(
    tiny_chat: StoredModel, tmp_path: Path
) -> None:
    keys = Keys(
        tmp_path / "keys.toml",
        alice={},
        bob={},
        carol={"cache_group": "public"},
        dave={"cache_group": "public"},
        root={"admin": True},
    )
    body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "temperature": 0}

    async def computed(cluster: Cluster, name: str, **more: str) -> tuple[int, int]:
        """Prompt tokens that were computed for a request, and those reported as cached."""
        before = (await cluster.totals(cluster.workers)).prefill_tokens_computed
        headers = {**keys.headers[name], **more}
        response = await cluster.client.post(COMPLETIONS, json=body, headers=headers)
        assert response.status_code == 200, response.text
        await cluster.settle()
        after = (await cluster.totals(cluster.workers)).prefill_tokens_computed
        usage = response.json()["usage"]
        return after - before, usage["prompt_tokens_details"]["cached_tokens"]

    async with running_cluster(
        tiny_chat, router={"api_keys_file": keys.path, "decode_prefills": "never"}
    ) as cluster:
        assert await computed(cluster, "alice") == (100, 0)
        assert await computed(cluster, "alice") == (4, 96)
        assert await computed(cluster, "bob") == (100, 0)
        # A salt of its own that spells another's does not help.
        body["cache_salt"] = "12:tenant alice"
        assert await computed(cluster, "bob") == (100, 0)
        del body["cache_salt"]
        assert await computed(cluster, "carol") == (100, 0)
        assert await computed(cluster, "dave") == (4, 96)
        assert await computed(cluster, "root") == (100, 0)
        assert await computed(cluster, "root", **{"x-baton-tenant": "alice"}) == (4, 96)
