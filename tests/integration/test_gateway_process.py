"""`python -m router` as a process: how it starts, what it says, how it ends."""

import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

NO_REDIS = "redis://127.0.0.1:1/0"


@contextmanager
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
        assert (ready.status_code, ready.json()["missing"]) == (503, ["prefill", "decode"])
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said
    assert "Traceback" not in said
