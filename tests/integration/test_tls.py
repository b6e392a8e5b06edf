"""Mutual TLS between processes: who is let in, who is not, and what the log says of it."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cluster.probe import probe
from baton.cluster.rpc import ChannelPool, make_server
from baton.cluster.tls import TlsFolder, authority
from baton.cluster.tls.authority import Order
from baton.store import StoredModel
from baton.v1 import decode_pb2, decode_pb2_grpc, kv_pb2, kv_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.cluster import CHAT, Cluster, running_cluster
from tests.support.tls import HOSTS, dial, make_certificates, server_process, stranger

ASK = {
    "messages": [{"role": "user", "content": "one two three " * 12}],
    "max_tokens": 6,
    "temperature": 0,
}


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    return make_certificates(tmp_path / "ca")


def with_tls(certificates: Path) -> dict[str, Any]:
    return {role: {"tls_dir": certificates / role} for role in ("router", "prefill", "decode")}


async def is_serving(channel: grpc.aio.Channel) -> bool:
    answer = await health_pb2_grpc.HealthStub(channel).Check(
        health_pb2.HealthCheckRequest(), timeout=5
    )
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def transports_of(cluster: Cluster) -> set[str]:
    """Those that hand-offs have used, as prefill workers announce them."""
    infos = [await cluster.info(worker) for worker in cluster.prefills]
    return {link.transport for info in infos for link in info.links}


@pytest.mark.parametrize("transport", ["shm", "torch", "grpc"])
async def test_answers_are_the_same_with_tls_on_every_transport(
    tiny_chat: StoredModel, certificates: Path, transport: str
) -> None:
    async with running_cluster(tiny_chat, transport=transport) as plain:
        expected = (await plain.ask(CHAT, **ASK)).text
    async with running_cluster(tiny_chat, transport=transport, **with_tls(certificates)) as cluster:
        assert (await cluster.ask(CHAT, **ASK)).text == expected
        assert (await cluster.ask(CHAT, stream=True, **ASK)).text == expected
        totals = await cluster.totals(cluster.prefills)
        assert totals.handoffs == 2 and totals.handoffs_failed == 0
        used = {"torch": "torch:gloo"}.get(transport, transport)
        assert await transports_of(cluster) == {used}


async def test_tls_makes_auto_leave_out_what_is_sent_in_clear(
    tiny_chat: StoredModel, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engine.transfer.shm.supported", lambda: False)  # as between hosts
    async with running_cluster(tiny_chat, **with_tls(certificates)) as cluster:
        await cluster.ask(CHAT, **ASK)
        (decode,), (prefill,) = cluster.decodes, cluster.prefills
        assert decode.settings.transports == prefill.settings.transports == ("shm", "grpc")
        assert await transports_of(cluster) == {"grpc"}


@pytest.fixture
async def decode(tiny_chat: StoredModel, certificates: Path) -> AsyncIterator[tuple[Cluster, str]]:
    """A cluster on TLS and the address of its decode worker."""
    async with running_cluster(tiny_chat, **with_tls(certificates)) as cluster:
        records = cluster.gateway.directory.snapshot()
        yield cluster, next(r.address for r in records if r.role == "decode")


async def test_a_role_gets_only_what_is_its_business(
    decode: tuple[Cluster, str], certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, address = decode

    async def generates(channel: grpc.aio.Channel) -> None:
        call = decode_pb2_grpc.DecodeStub(channel).Generate(decode_pb2.GenerateRequest())
        await call.read()

    async def pushes(channel: grpc.aio.Channel) -> None:
        call = kv_pb2_grpc.KVTransferStub(channel).Push()
        await call.write(kv_pb2.KVFrame())
        await call.read()

    async def drains(channel: grpc.aio.Channel) -> None:
        request = worker_pb2.DrainRequest(timeout_s=1, undo=True)
        await worker_pb2_grpc.WorkerStub(channel).Drain(request, timeout=5)

    refused = grpc.StatusCode.PERMISSION_DENIED
    for role, action, allowed in [
        ("router", generates, True), ("prefill", generates, False), ("admin", generates, False),
        ("prefill", pushes, True), ("router", pushes, False), ("decode", pushes, False),
        ("admin", drains, True), ("prefill", drains, False),
    ]:  # fmt: skip
        async with dial(address, certificates, role) as channel:
            assert await is_serving(channel)
            for _ in range(2):
                try:
                    await action(channel)
                    code = grpc.StatusCode.OK
                except grpc.aio.AioRpcError as error:
                    code = error.code()
                assert (code is not refused) == allowed, (role, action, code)
    told = [r.getMessage() for r in caplog.records if "refused: " in r.getMessage()]
    assert sum("'prefill', for /baton.v1.Decode/Generate" in line for line in told) == 1
    assert sum("for /baton.v1.Decode/Generate" in line for line in told) == 2
    await cluster.settle()


async def test_a_certificate_of_our_authority_for_no_role_is_refused_and_told_once(
    certificates: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("baton.cluster.tls.authority.SPIFFE", "spiffe://elsewhere/")
    authority.issue(certificates, tmp_path / "foreign/router", Order("router", HOSTS, timedelta(1)))
    tls = TlsFolder(certificates / "decode")
    server, port = await make_server([], "127.0.0.1:0", [], tls=tls)
    await server.start()
    for _ in range(3):
        async with dial(f"127.0.0.1:{port}", tmp_path / "foreign") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await is_serving(channel)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    await server.stop(0)
    assert sum("refused: " in record.getMessage() for record in caplog.records) == 1


async def test_peers_that_cannot_prove_themselves_are_refused_and_each_reason_is_told_once(
    certificates: Path, tmp_path: Path
) -> None:
    others = stranger(tmp_path / "others", certificates)
    expiring = tmp_path / "expiring"
    authority.issue(certificates, expiring / "router", Order("router", HOSTS, timedelta(seconds=3)))
    material = TlsFolder(expiring / "router").latest()
    with server_process(certificates / "decode") as server:
        async with dial(server.address, certificates) as channel:
            assert await is_serving(channel)
        await asyncio.sleep(3.1)  # until the certificate has expired
        kinds: list[Any] = [
            lambda: dial(server.address, None),
            lambda: dial(server.address, others),
            lambda: grpc.aio.secure_channel(
                server.address, grpc.ssl_channel_credentials(material.ca)
            ),
            lambda: grpc.aio.secure_channel(
                server.address,
                grpc.ssl_channel_credentials(material.ca, material.key, material.cert),
            ),
        ]
        for kind in kinds:
            for _ in range(3):
                async with kind() as channel:
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await is_serving(channel)
                    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        async with dial(server.address, certificates) as channel:
            assert await is_serving(channel)
        told = server.stop()
    reasons = ["speak TLS", "local issuer", "shows no certificate", "has expired"]
    assert len(told) == len(reasons), told
    for reason in reasons:
        assert sum(reason in line for line in told) == 1, told


async def test_a_worker_that_cannot_prove_itself_is_told_once_and_never_used(
    tiny_chat: StoredModel, certificates: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An impostor stands in the registry, as one could who writes to Redis."""
    impostor = make_certificates(tmp_path / "impostor")
    async with running_cluster(
        tiny_chat, decodes=0, transport="grpc", **with_tls(certificates)
    ) as cluster:
        await cluster.add_decode(tls_dir=impostor / "decode")
        await cluster.wait_for_workers()
        for _ in range(3):
            response = await cluster.post(CHAT, **ASK)
            assert response.status_code == 503, response.text
            assert "CERTIFICATE" not in response.text
        told = [r.getMessage() for r in caplog.records if "handshake" in r.getMessage()]
        assert len(told) == 1 and "CERTIFICATE_VERIFY_FAILED" in told[0]
        for worker in cluster.workers:
            worker.assert_books_at_baseline()


async def test_certificates_and_even_the_authority_change_without_a_restart(
    certificates: Path, tmp_path: Path
) -> None:
    folders = {role: certificates / role for role in ("decode", "router")}
    old = TlsFolder(folders["router"]).latest()
    server, port = await make_server([], "127.0.0.1:0", [], tls=TlsFolder(folders["decode"]))
    await server.start()
    address = f"127.0.0.1:{port}"
    pool = ChannelPool(tls=TlsFolder(folders["router"]))
    try:
        first = pool.get(address)
        assert await is_serving(first) and pool.get(address) is first
        watch = health_pb2_grpc.HealthStub(first).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        fresh = tmp_path / "fresh"
        authority.create(fresh, timedelta(days=1))
        for role, folder in folders.items():
            authority.issue(fresh, folder, Order(role, HOSTS, timedelta(hours=1)))
        second = pool.get(address)
        assert second is not first and await is_serving(second)
        assert not watch.done()  # what runs goes on
        watch.cancel()
        late = grpc.aio.secure_channel(
            address, grpc.ssl_channel_credentials(old.ca, old.key, old.cert)
        )
        async with late:
            with pytest.raises(grpc.aio.AioRpcError):
                await is_serving(late)
    finally:
        await pool.close()
        await server.stop(0)


async def test_the_probe_of_a_container_shows_the_certificate_of_its_process(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, port = await make_server([], "127.0.0.1:0", [], tls=TlsFolder(certificates / "decode"))
    await server.start()
    url = f"grpc://127.0.0.1:{port}"
    assert "UNAVAILABLE" in (await asyncio.to_thread(probe, url, 2.0) or "")
    monkeypatch.setenv("BATON_TLS_DIR", str(certificates / "decode"))
    assert await asyncio.to_thread(probe, url) is None
    await server.stop(0)
