"""The ways in: the command on a cluster and on a laptop, a submitted job, a Serve application."""

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from baton_ray.serve_app import build
from ray import serve
from ray.serve.schema import ServeDeploySchema

from baton.cli.up import up
from baton.cluster.errors import BatonError
from baton.store import StoredModel
from tests.support.ray_nodes import COMPLETIONS, RayNodes
from tests.support.up import baton_up

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
QUICK = ("--dtype=float32", "--num-blocks=64", "--decode-prefills=never")
QUESTION = {"prompt": "One day", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
START_S = 240.0


def ask(url: str) -> str:
    answer = httpx.post(f"{url}{COMPLETIONS}", json=QUESTION, timeout=60, follow_redirects=True)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8
    return str(answer.json()["choices"][0]["text"])


def services(nodes: RayNodes) -> list[int]:
    """Baton's processes on these nodes."""
    return [p.pid for p in psutil.process_iter() if _is_service(p, nodes)]


def _is_service(process: psutil.Process, nodes: RayNodes) -> bool:
    try:
        words = " ".join(process.cmdline())
        ours = process.environ().get("BATON_HOME") == str(nodes.home)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return ours and any(w in words for w in ("baton prefill", "baton decode", "-m router"))


def wait_gone(nodes: RayNodes) -> None:
    deadline = time.monotonic() + 20
    while services(nodes):
        assert time.monotonic() < deadline, services(nodes)
        time.sleep(0.1)


async def test_the_command_serves_on_a_cluster_and_a_signal_ends_everything_in_order(
    nodes: RayNodes, tiny_chat: StoredModel
) -> None:
    async with baton_up("--ray", nodes.address, f"--model={tiny_chat.path}", *QUICK) as running:
        assert await asyncio.to_thread(ask, running.url)
        assert len(services(nodes)) == 3
        assert await running.stop(signal.SIGTERM) == 0
    wait_gone(nodes)
    assert any("draining id=decode-0" in line for line in running.lines)
    assert not [line for line in running.lines if "killing" in line or "Traceback" in line]


async def test_nothing_outlives_a_command_that_is_killed(
    nodes: RayNodes, tiny_chat: StoredModel
) -> None:
    async with baton_up("--ray", nodes.address, f"--model={tiny_chat.path}", *QUICK) as running:
        assert len(services(nodes)) == 3
        running.process.kill()
        await asyncio.to_thread(wait_gone, nodes)


async def test_a_laptop_needs_no_cluster_and_nothing_of_baton_listens_beyond_it(
    tiny_chat: StoredModel, nodes: RayNodes
) -> None:
    async with baton_up("--ray=local", f"--model={tiny_chat.path}", *QUICK) as running:
        assert await asyncio.to_thread(ask, running.url)
        for pid in services(nodes):
            listening = [c for c in psutil.Process(pid).net_connections() if c.status == "LISTEN"]
            assert listening and {c.laddr.ip.removeprefix("::ffff:") for c in listening} == {
                "127.0.0.1"
            }
        assert await running.stop(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ray=127.0.0.1:1"], "There is no Ray cluster at --ray 127.0.0.1:1"),
        (["--ray=somewhere"], "There is no Ray cluster at --ray somewhere"),
        (["--ray=ray://127.0.0.1:1"], "is a Ray Client"),
        (["--max-decode=2"], "--max-decode needs --ray"),
        (["--ray=local", "--decode=2", "--max-decode=1"], "must be at least --decode, 2"),
        (["--ray=local", "--gpus-per-worker=1.5"], "a part of one GPU, or a whole number"),
    ],
)
def test_what_cannot_work_is_a_sentence(
    tiny_chat: StoredModel, nodes: RayNodes, flags: list[str], said: str
) -> None:
    with pytest.raises(BatonError, match=re.escape(said)):
        up(["--port=0", f"--model={tiny_chat.path}", *flags])


async def test_a_configuration_that_cannot_work_ends_the_command_with_the_workers_sentence(
    tiny_chat: StoredModel, nodes: RayNodes
) -> None:
    command = [Path(sys.executable).parent / "baton", "up", "--port=0", f"--model={tiny_chat.path}"]
    command += ["--ray", nodes.address, "--num-blocks=2000000000"]
    ended = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1
    assert "cannot start: too little memory" in ended.stderr
    wait_gone(nodes)


def test_a_submitted_job_serves_until_it_is_stopped(
    nodes: RayNodes, tiny_chat: StoredModel
) -> None:
    """On a cluster with a dashboard, which takes jobs."""
    dashboard, agent, port, name = free_port(), free_port(), free_port(), "baton-job"
    entry = f"baton up --ray --port={port} --model={tiny_chat.path} {' '.join(QUICK)}"
    head = {"include_dashboard": True, "dashboard_port": dashboard}
    head["dashboard_agent_listen_port"] = agent  # the other head has the usual one
    others = RayNodes(1, nodes.home, **head)
    try:
        job("submit", dashboard, "--submission-id", name, "--no-wait", "--", *entry.split())
        wait_ready(f"http://127.0.0.1:{port}")
        assert ask(f"http://127.0.0.1:{port}")
        job("stop", dashboard, name)
        wait_gone(nodes)
    finally:
        others.shutdown()


def job(verb: str, dashboard: int, *arguments: str) -> None:
    """Again while the agents that take jobs are not there yet."""
    address = f"--address=http://127.0.0.1:{dashboard}"
    command = [Path(sys.executable).parent / "ray", "job", verb, address, *arguments]
    deadline = time.monotonic() + START_S
    while True:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if ended.returncode == 0:
            return
        assert "No available agent" in ended.stderr + ended.stdout, ended.stdout + ended.stderr
        assert time.monotonic() < deadline
        time.sleep(1)


def test_a_serve_application_points_to_its_router_and_ends_with_it(
    nodes: RayNodes, tiny_chat: StoredModel
) -> None:
    """Requests are sent on with 307, so no token passes through Serve."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = {"dtype": "float32", "num_blocks": "64", "decode_prefills": "never"}
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(build({"model": str(tiny_chat.path), "port": "0", **options}), name="baton")
        told = httpx.get(url).json()
        wait_ready(told["router"])
        assert set(httpx.get(url).json()["processes"]) == {"router", "prefill-0", "decode-0"}
        sent_on = httpx.post(f"{url}{COMPLETIONS}", json=QUESTION)
        assert sent_on.status_code == 307
        assert sent_on.headers["location"] == f"{told['router']}{COMPLETIONS}"
        assert ask(url) == ask(told["router"])
    finally:
        serve.shutdown()
    wait_gone(nodes)


def test_the_shipped_serve_configurations_are_valid_and_name_settings_that_exist() -> None:
    text = (ROOT / "deploy/ray/serve.yaml").read_text()
    service = (ROOT / "deploy/ray/rayservice.yaml").read_text()
    nested = re.search(r"serveConfigV2: \|\n((?:    .*\n|\n)+)", service)
    assert nested is not None
    for config in (text, nested[1]):
        schema = ServeDeploySchema.model_validate(yaml.safe_load(config))
        (application,) = schema.applications
        assert application.import_path == "baton_ray.serve_app:build"
        build(application.args)


def wait_ready(url: str) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            if httpx.get(f"{url}/health/ready").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, f"{url} is not ready"
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
