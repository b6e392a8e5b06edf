"""Metrics as Prometheus reads them: conventions, labels, and rules and panels that name them."""

import asyncio
import json
import random
import re
import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.cluster.errors import SettingsError
from baton.store import StoredModel
from baton.worker.exposition import LABELS
from router.text import TextModel
from tests.support.byte_model import byte_model
from tests.support.cluster import COMPLETIONS, running_cluster
from tests.support.gateway import running_gateway
from tests.support.stub_workers import scripted

ROOT = Path(__file__).parents[2]
PROMTOOL = shutil.which("promtool")
SUFFIXES = r"(_total|_bucket|_sum|_count|_created|_info)?$"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return byte_model(Path(tmp_path_factory.mktemp("model")))


def check_text(text: str) -> set[str]:
    """Prometheus's own parser takes it, and promtool finds nothing to say. The families."""
    families = list(text_string_to_metric_families(text))
    if PROMTOOL:
        found = subprocess.run(
            [PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, timeout=30
        )
        assert found.returncode == 0, found.stdout + found.stderr
    return {family.name for family in families}


async def router_metrics(model: TextModel) -> str:
    async with running_gateway(model, scripted("ok")) as running:
        headers = {"x-baton-ttft-ms": "0.001"}
        await running.post(COMPLETIONS, {"prompt": "x", "max_tokens": 4}, headers=headers)
        # A request is counted once its last byte has left, which its client may notice first.
        async with asyncio.timeout(15):
            while "baton_misses_total{" not in (text := await _get(running.client)):
                continue
        return text


async def _get(client: httpx.AsyncClient) -> str:
    return (await client.get("/metrics")).text


def free_port() -> int:
    """Below those that the system gives out: a connection of another test took the port before
    its worker did."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
            return int(probe.getsockname()[1])


async def worker_metrics(tiny_chat: StoredModel) -> tuple[str, str]:
    """Of a prefill and a decode worker that have served one request."""
    ports = free_port(), free_port()
    async with running_cluster(
        tiny_chat,
        router={"policy": "round_robin", "decode_prefills": "never"},
        prefill={"metrics_port": ports[0]},
        decode={"metrics_port": ports[1]},
    ) as cluster:
        await cluster.ask(COMPLETIONS, prompt=list(range(5, 60)), max_tokens=4, ignore_eos=True)
        await cluster.settle()
        async with httpx.AsyncClient(trust_env=False) as client:
            texts = [(await client.get(f"http://127.0.0.1:{port}/metrics")).text for port in ports]
    return texts[0], texts[1]


async def test_router_metrics_keep_the_conventions_and_name_causes(model: TextModel) -> None:
    text = await router_metrics(model)
    names = check_text(text)
    assert {"baton_ttft_seconds", "baton_requests", "baton_phase_seconds"} <= names
    # How busy the machine is decides which cause it was.
    assert re.search(r'baton_misses_total\{cause="[a-z_]+",target="ttft"\} 1\.0', text)
    assert re.search(r'baton_phase_seconds_count\{phase="admission"\} 1\.0', text)


async def test_worker_metrics_carry_model_role_and_worker(tiny_chat: StoredModel) -> None:
    prefill, decode = await worker_metrics(tiny_chat)
    assert check_text(prefill) == check_text(decode)
    own = 'model="tiny-chat",role="prefill",worker="prefill-0"'
    assert f"baton_worker_handoffs_total{{{own}}} 1.0" in prefill
    assert f"baton_worker_prefill_tokens_computed_total{{{own}}} 55.0" in prefill
    assert 'baton_worker_tokens_generated_total{model="tiny-chat",role="decode"' in decode
    for family in text_string_to_metric_families(prefill):
        for sample in family.samples:
            assert set(LABELS) <= sample.labels.keys() <= {*LABELS, "state"}
    blocks = {
        sample.labels["state"]: sample.value
        for family in text_string_to_metric_families(prefill)
        if family.name == "baton_worker_kv_blocks"
        for sample in family.samples
    }
    assert sum(blocks.values()) == 256 and blocks["used"] == 0 and blocks["cached"] == 3


async def test_rules_and_panels_name_metrics_that_exist(
    model: TextModel, tiny_chat: StoredModel
) -> None:
    known = check_text(await router_metrics(model))
    known |= check_text((await worker_metrics(tiny_chat))[0])
    board = json.loads((ROOT / "deploy/grafana/baton.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked.append((ROOT / "deploy/prometheus/alerts.yml").read_text())
    named = {name for text in asked for name in re.findall(r"\bbaton_[a-z_]+", text)}
    assert named
    for name in named:
        assert re.sub(SUFFIXES, "", name) in known or name in known, name


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool on PATH")
def test_promtool_accepts_configuration_and_rules() -> None:
    found = subprocess.run(
        [str(PROMTOOL), "check", "config", str(ROOT / "deploy/prometheus/prometheus.yml")],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "8 rules found" in found.stdout


async def test_a_metrics_port_that_is_taken_is_said_in_a_sentence(tiny_chat: StoredModel) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match="--metrics-port"):
            async with running_cluster(tiny_chat, 1, 0, prefill={"metrics_port": port}):
                pass
