"""`python -m baton.cluster.probe`: what health checks of containers run."""

import asyncio
from pathlib import Path

import pytest

from baton.cluster.probe import main, probe
from baton.cluster.rpc import make_server
from tests.support.byte_model import byte_model
from tests.support.gateway import running_gateway
from tests.support.stub_workers import scripted


async def test_a_worker_is_healthy_as_long_as_its_server_runs() -> None:
    server, port = await make_server([], "127.0.0.1:0", [])
    await server.start()
    url = f"grpc://127.0.0.1:{port}"
    assert await asyncio.to_thread(probe, url) is None
    await server.stop(0)
    assert "UNAVAILABLE" in (await asyncio.to_thread(probe, url, 1.0) or "")


async def test_a_router_is_healthy_when_it_can_serve(tmp_path: Path) -> None:
    model = byte_model(tmp_path)
    async with running_gateway(model, scripted("x")) as gateway:
        assert await asyncio.to_thread(probe, f"{gateway.url}/health") is None
    async with running_gateway(model, scripted("x"), decodes=0) as gateway:
        assert "503" in (await asyncio.to_thread(probe, f"{gateway.url}/health") or "")


def test_the_exit_code_says_it_to_docker(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["http://127.0.0.1:1/health"]) == 1
    assert "refused" in capsys.readouterr().out
    assert main([]) == 2
