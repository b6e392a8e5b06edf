"""A real `baton up` for benchmarks: child processes, a free port, a client."""

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import httpx
import psutil

START_DEADLINE_S = 120.0
STOP_DEADLINE_S = 60.0
LAST_LINES = 5


@dataclass(frozen=True)
class Cluster:
    """`first_answer_s`: from the start of `baton up` to its first answer."""

    client: httpx.Client
    first_answer_s: float
    pid: int

    def workers(self, role: str) -> list[psutil.Process]:
        """The processes of a role."""
        children = psutil.Process(self.pid).children(recursive=True)
        return [child for child in children if role in child.cmdline()]

    def prefill_cores(self) -> list[int]:
        (worker,) = self.workers("prefill")
        return worker.cpu_affinity() or []


@contextmanager
def running_cluster(model: str, *flags: str) -> Iterator[Cluster]:
    """`baton up` with one prefill worker and whatever else `flags` say. Every prompt is handed
    over: these benchmarks measure the split."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = time.perf_counter()
    command = [sys.executable, "-m", "baton", "up", "--port", str(port), "--model", model]
    command += ["--decode-prefills", "never", *flags]
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(command, stdout=words, stderr=subprocess.STDOUT)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                _wait_ready(client, process, words)
                first = {"prompt": [1, 2, 3], "max_tokens": 2}
                client.post("/v1/completions", json=first).raise_for_status()
                yield Cluster(client, time.perf_counter() - started, process.pid)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def _wait_ready(client: httpx.Client, process: subprocess.Popen[bytes], words: IO[bytes]) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"baton up ended early:\n{_last_lines(words)}")
        try:
            if client.get("/health/ready").is_success:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.02)
    raise SystemExit(f"baton up was not ready within {START_DEADLINE_S} s:\n{_last_lines(words)}")


def _last_lines(words: IO[bytes]) -> str:
    words.seek(0)
    return "\n".join(words.read().decode(errors="replace").splitlines()[-LAST_LINES:])
