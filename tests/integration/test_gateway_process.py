"""`python -m router` as a process: how it starts, what it says, how it ends."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import psutil
import pytest

NO_REDIS = "redis://127.0.0.1:1/0"


@contextlib.contextmanager
def router(*flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "router", "--redis-url", NO_REDIS, *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    guard = threading.Timer(60, process.kill)
    guard.start()
    try:
        yield process
    finally:
        guard.cancel()
        process.kill()
        process.communicate()


def lines_until(process: subprocess.Popen[str], wanted: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(wanted, line):
            return found[1]
    raise AssertionError(f"the process ended without saying {wanted!r}")


def test_a_taken_port_is_one_sentence_and_exit_code_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with router("--port", str(taken.getsockname()[1])) as process:
            _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "choose another --port" in said
    assert "Traceback" not in said


def test_a_model_that_does_not_exist_is_one_sentence_and_exit_code_2() -> None:
    with router("--port", "0", "--model", "/nowhere/at/all") as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "/nowhere/at/all" in said
    assert "Traceback" not in said


@pytest.mark.model
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_without_redis_and_ends_in_order_on_a_signal(number: signal.Signals) -> None:
    with router("--port", "0") as process:
        url = lines_until(process, r"ready role=router .*address=(\S+)")
        assert httpx.get(f"{url}/health/live").status_code == 200
        ready = httpx.get(f"{url}/health/ready")
        assert (ready.status_code, ready.json()["missing"]) == (503, ["decode"])
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said
    assert "Traceback" not in said


@pytest.mark.model
def test_routers_that_share_a_port_serve_as_one_when_one_of_them_dies() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    flags = ("--port", str(port), "--reuse-port")
    with router(*flags) as first, router(*flags) as second:
        url = lines_until(first, r"ready role=router .*address=(\S+)")
        assert lines_until(second, r"ready role=router .*address=(\S+)") == url
        assert _pids_that_answer(url, port) == {first.pid, second.pid}
        first.kill()
        first.wait(10)
        for _ in range(20):
            assert httpx.get(f"{url}/health/live").status_code == 200
        with router(*flags) as third:
            lines_until(third, r"ready role=router .*address=(\S+)")
            assert _pids_that_answer(url, port) == {second.pid, third.pid}


def _pids_that_answer(url: str, port: int) -> set[int]:
    """The processes at the other end of some connections; each goes to one by chance."""
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            client = stack.enter_context(httpx.Client())
            assert client.get(f"{url}/health/live").status_code == 200
        found = {
            process.pid
            for process in psutil.Process().children()
            for connection in process.net_connections("tcp")
            if connection.status == "ESTABLISHED" and connection.laddr.port == port
        }
    return found
