"""docker-compose.yml as it is written, and as `docker compose config` reads it; no engine runs."""

import asyncio
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.cluster import redis_client
from baton.cluster.tls import authority
from baton.cluster.tls.folder import CA
from tests.support.compose import eventually
from tests.support.redis_servers import free_port, redis_7
from tests.support.tls import make_certificates

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
SERVICES: dict[str, Any] = yaml.safe_load(TEXT)["services"]
ENV_EXAMPLE = (ROOT / ".env.example").read_text(encoding="utf-8")


def test_every_variable_is_explained_in_the_example_and_no_other_is() -> None:
    used = set(re.findall(r"(?<!\$)\$\{([A-Z_]+)", TEXT))
    explained = set(re.findall(r"^#?([A-Z_]+)=", ENV_EXAMPLE, flags=re.MULTILINE))
    assert used == explained - {"COMPOSE_PROFILES"}  # compose itself reads that one


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["init"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"] and service["pids_limit"] and service["restart"]


def test_ports_are_published_on_loopback_and_by_router_and_dashboard_only() -> None:
    published = {name: s["ports"] for name, s in SERVICES.items() if "ports" in s}
    assert published == {
        "router": ["${LISTEN:-127.0.0.1}:${PORT:-8000}:8000"],
        "grafana": ["127.0.0.1:${GRAFANA_PORT:-3000}:3000"],
    }


def test_images_of_others_have_a_version() -> None:
    images = {s["image"] for s in SERVICES.values() if not s["image"].startswith("${")}
    images |= set(re.findall(r"_IMAGE:-([^}]+)", TEXT))
    for image in images - {f"baton-{name}:latest" for name in ("router", "worker", "worker-gpu")}:
        assert re.search(r":v?\d", image), image


def test_the_user_of_redis_may_do_what_is_documented() -> None:
    (documented,) = re.findall(
        r"^user baton .*$", (ROOT / "docs/security.md").read_text(), flags=re.MULTILINE
    )
    (configured,) = re.findall(r"^ *(user baton .*)$", TEXT, flags=re.MULTILINE)
    assert configured.replace("$$REDIS_PASSWORD", "CHANGE_ME") == documented


@contextmanager
def redis_as_written(folder: Path, tls: str = "", **changes: str) -> Iterator[None]:
    """The script of the service, ready; `changes`: what is elsewhere in this test."""
    script = SERVICES["redis"]["command"][2].replace("$$", "$").replace("/tmp/", f"{folder}/")
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    server = subprocess.Popen(
        ["sh", "-c", script], env=os.environ | {"REDIS_PASSWORD": "s3cret", "TLS": tls},
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        assert any("eady to accept" in line for line in server.stdout)
        yield
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()


@redis_7
def test_redis_starts_as_written_and_lets_in_who_knows_the_password(tmp_path: Path) -> None:
    import redis

    path = str(tmp_path / "socket")
    socket = f"redis-server - --port 0 --unixsocket {path}"
    with (
        redis_as_written(tmp_path, **{"redis-server -": socket}),
        redis.Redis(unix_socket_path=path, username="baton", password="s3cret") as baton,
        redis.Redis(unix_socket_path=path) as stranger,
    ):
        assert baton.ping() and baton.set("{baton}:x", "1")
        with pytest.raises(redis.exceptions.NoPermissionError):
            baton.keys("*")
        with pytest.raises(redis.exceptions.AuthenticationError):
            stranger.ping()


@redis_7
async def test_redis_of_the_profile_tls_shows_its_certificate_and_the_renewed_one_too(
    tmp_path: Path,
) -> None:
    """To clients as the cluster's URL makes them."""
    (tmp_path / "authority").mkdir()
    made = make_certificates(tmp_path / "authority")
    port = str(free_port())
    elsewhere = {"certs=/etc/baton/certs": f"certs={made}", "sleep 600": "sleep 0.2"}
    elsewhere["--tls-port 6379"] = f"--tls-port {port}"
    url = f"rediss://baton:s3cret@localhost:{port}/0?ssl_ca_certs={made}/{CA}"

    async def serial() -> int:
        """Of the certificate that a new connection sees."""
        context = ssl.create_default_context(cafile=made / CA)
        _, writer = await asyncio.open_connection("localhost", int(port), ssl=context)
        shown = writer.get_extra_info("ssl_object").getpeercert()
        writer.close()
        return int(shown["serialNumber"], 16)

    async def renewed() -> bool:
        return await serial() == authority.read(made / "redis").serial

    with redis_as_written(tmp_path, "https", **elsewhere):
        client = redis_client.connect(url)
        assert await redis_client.answer(client.ping(), 10)
        assert await renewed()
        authority.renew(made, made / "redis", always=True)
        await eventually(renewed, 30)
        await redis_client.close(client)


@pytest.mark.parametrize("tls", ["", "https"])
def test_the_profile_tls_makes_certificates_or_refuses_to_go_on_in_clear(
    tmp_path: Path, tls: str
) -> None:
    script = SERVICES["certs"]["command"][0].replace("$$", "$")
    script = script.replace("/etc/baton/", f"{tmp_path}/")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    certs = subprocess.Popen(
        ["sh", "-c", script],
        env=os.environ | {"TLS": tls, "GATEWAY_HOST": "x.example", "PATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        if not tls:
            said, _ = certs.communicate(timeout=20)
            assert certs.returncode == 1 and "TLS=https" in said
            return
        deadline = time.monotonic() + 30
        while not (tmp_path / "certs/ca.crt").exists():
            assert time.monotonic() < deadline and certs.poll() is None
            time.sleep(0.05)
        for role in ("router", "prefill", "decode", "gateway", "redis"):
            assert (tmp_path / "certs" / role / "tls.key").exists()
    finally:
        certs.kill()
        certs.communicate()


@pytest.mark.parametrize("tls", ["http", "https"])
def test_prometheus_asks_services_that_exist_at_the_ports_they_have(tls: str) -> None:
    config = yaml.safe_load((ROOT / f"deploy/prometheus/compose-{tls}.yml").read_text())
    router, workers = config["scrape_configs"]
    assert router.get("scheme", "http") == tls
    assert set(router["dns_sd_configs"][0]["names"]) == {"router"}
    assert router["dns_sd_configs"][0]["port"] == 8000
    assert set(workers["dns_sd_configs"][0]["names"]) == {"prefill", "decode"}
    for name in ("prefill", "decode"):
        port = SERVICES[name]["environment"]["BATON_METRICS_PORT"]
        assert workers["dns_sd_configs"][0]["port"] == int(port)
    (target,) = [c["target"] for c in SERVICES["prometheus"]["configs"]]
    assert router["authorization"]["credentials_file"] == target
    assert config["rule_files"] == ["alerts.yml"]
    assert (ROOT / "deploy/prometheus/alerts.yml").exists()
    if tls == "https":
        assert f"--host {router['tls_config']['server_name']} " in SERVICES["certs"]["command"][0]


def resolved(*profiles: str, **variables: str) -> dict[str, Any]:
    """As docker compose understands it."""
    flags = [part for profile in profiles for part in ("--profile", profile)]
    done = subprocess.run(
        ["docker", "compose", "--env-file", "/dev/null", *flags, "config", "--format", "json"],
        cwd=ROOT,
        env=os.environ | {"REDIS_PASSWORD": "s3cret", **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    services: dict[str, Any] = json.loads(done.stdout)["services"]
    return services


def _has_compose() -> bool:
    return (
        shutil.which("docker") is not None
        and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    )


docker_needed = pytest.mark.skipif(not _has_compose(), reason="no docker compose on this machine")
BASE = {"redis", "router", "prefill", "decode"}


@docker_needed
def test_profiles_add_services_and_tls_reaches_every_process() -> None:
    plain = resolved()
    assert set(plain) == BASE
    assert not any(s.get("environment", {}).get("BATON_TLS_DIR") for s in plain.values())
    everything = resolved("tls", "monitoring", TLS="https")
    assert set(everything) == BASE | {"certs", "prometheus", "grafana"}
    for name in ("router", "prefill", "decode"):
        environment = everything[name]["environment"]
        assert environment["BATON_TLS_DIR"] == f"/etc/baton/certs/{name}"
        assert environment["BATON_TLS_SERVER_NAME"] == "workers.internal"
        assert everything[name]["depends_on"]["certs"]["condition"] == "service_healthy"
        assert environment["BATON_REDIS_URL"].startswith("rediss://")
    for name in ("prefill-gpu", "decode-gpu"):
        worker = resolved("gpu")[name]
        (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
        assert worker["build"]["args"]["TORCH_INDEX_URL"].endswith("/cu130")
    certfile = everything["router"]["environment"]["BATON_SSL_CERTFILE"]
    assert certfile == "/etc/baton/certs/gateway/tls.crt"
    for tls in ("", "https"):
        command = resolved("monitoring", TLS=tls)["prometheus"]["command"]
        file = command[0].partition("/etc/prometheus/")[2]
        assert (ROOT / "deploy/prometheus" / file).exists()
