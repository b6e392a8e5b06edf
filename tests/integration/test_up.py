"""`baton up` as a process: ready, signals, deaths, and nothing left running.

The children are the real router and workers on the default model, so these are slow tests.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from baton.cluster.probe import probe

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(400)]
STOP_S = 40
"""More than what `baton up` allows its children before it kills them."""
QUICK = ["--dtype=bfloat16", "--num-blocks=128", "--max-model-len=512"]
QUESTION = {
    "model": "smollm2",
    "temperature": 0,
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}


class Cluster:
    """One `baton up` and what it wrote."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def url(self) -> str:
        found = re.search(r"Baton is ready at (\S+)", self.log)
        return found[1] if found else ""

    def wait(self, condition: Callable[[], object], timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout_s} s:\n{self.log}")
            time.sleep(0.05)

    def wait_ready(self) -> None:
        self.wait(lambda: self.url or self.process.poll() is not None)
        assert self.url, self.log

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, word: str) -> psutil.Process:
        return next(child for child in self.family() if word in " ".join(child.cmdline()))

    def ask(self) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/chat/completions", json=QUESTION, timeout=120)


@contextlib.contextmanager
def started(tmp_path: Path, *flags: str, command: list[str] | None = None) -> Iterator[Cluster]:
    path = tmp_path / "log"
    argv = command or [sys.executable, "-c", "from baton.cli.main import main; main()", "up"]
    with path.open("wb") as log:
        process = subprocess.Popen(
            [*argv, "--port=0", *QUICK, *flags], stdout=log, stderr=subprocess.STDOUT
        )
    cluster, family = Cluster(process, path), []
    try:
        yield cluster
        with contextlib.suppress(psutil.NoSuchProcess):
            family = cluster.family()
    finally:
        process.kill()
        process.wait()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def assert_gone(family: list[psutil.Process], timeout_s: float = 20) -> None:
    _, alive = psutil.wait_procs(family, timeout_s)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_answers_and_a_signal_ends_everything_in_order(
    tmp_path: Path, number: signal.Signals
) -> None:
    with started(tmp_path) as cluster:
        cluster.wait_ready()
        answer = cluster.ask()
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"]
        family = cluster.family()
        assert len(family) == 4  # Redis, the router and two workers
        cluster.process.send_signal(number)
        assert cluster.process.wait(STOP_S) == 0
        assert_gone(family)
        assert "killing" not in cluster.log
        assert "curl http" in cluster.log and "baton status --url http" in cluster.log


def test_sigint_works_where_it_was_inherited_as_ignored(tmp_path: Path) -> None:
    """As in a background job of a script."""
    up = f"exec {sys.executable} -c 'from baton.cli.main import main; main()' up \"$@\""
    command = ["sh", "-c", f"trap '' INT; {up}", "sh"]
    with started(tmp_path, command=command) as cluster:
        cluster.wait_ready()
        family = cluster.family()
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.process.wait(STOP_S) == 0
        assert_gone(family)


def test_nothing_outlives_a_killed_baton_up(tmp_path: Path) -> None:
    with started(tmp_path) as cluster:
        cluster.wait_ready()
        family = cluster.family()
        cluster.process.kill()
        assert_gone(family)


def test_nothing_outlives_a_baton_up_killed_while_it_starts(tmp_path: Path) -> None:
    with started(tmp_path) as cluster:
        cluster.wait(lambda: "starting" in cluster.log and len(cluster.family()) >= 3)
        family = cluster.family()
        cluster.process.kill()
        assert_gone(family)


def test_a_killed_worker_and_a_killed_redis_come_back_and_requests_are_served(
    tmp_path: Path,
) -> None:
    with started(tmp_path) as cluster:
        cluster.wait_ready()
        cluster.child("baton decode").kill()
        cluster.child("redis-server").kill()
        cluster.wait(lambda: "decode-0 was killed by SIGKILL; starting it again" in cluster.log)
        cluster.wait(lambda: "redis ended; starting it again" in cluster.log)
        cluster.wait(lambda: cluster.log.count("ready role=decode") == 2)
        cluster.wait(lambda: cluster.ask().status_code == 200)


def test_too_little_memory_for_the_pool_is_a_sentence_and_no_endless_restart(
    tmp_path: Path,
) -> None:
    with started(tmp_path, "--num-blocks=2000000000") as cluster:
        assert cluster.process.wait(120) == 1
        assert "cannot start: " in cluster.log and "too little memory" in cluster.log
        assert "Traceback" not in cluster.log and "starting it again" not in cluster.log


def test_with_tls_requests_are_served_and_strangers_are_not(tmp_path: Path) -> None:
    """The folder of certificates goes with the cluster."""
    with started(tmp_path, "--tls") as cluster:
        cluster.wait_ready()
        assert cluster.ask().status_code == 200
        (folder,) = re.findall(r"certificates are in (\S+)", cluster.log)
        assert Path(folder).stat().st_mode & 0o777 == 0o700
        cluster.wait(lambda: "ready role=decode" in cluster.log)
        (address,) = re.findall(r"ready role=decode .*address=(\S+)", cluster.log)
        assert "Socket closed" in (probe(f"grpc://{address}") or "")
        cluster.wait(lambda: "handshake was refused: the peer does not speak TLS" in cluster.log)
        assert "Log level INFO" not in cluster.log
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.process.wait(STOP_S) == 0
        assert not Path(folder).exists()


def test_an_outside_redis_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with started(tmp_path, "--redis=redis://127.0.0.1:1/0") as cluster:
        assert cluster.process.wait(120) == 1
        assert "Cannot reach the Redis of --redis redis://127.0.0.1:1/0" in cluster.log


def test_workers_share_the_cores(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core cannot be shared out")
    with started(tmp_path) as cluster:
        cluster.wait_ready()
        prefill = set(cluster.child("baton prefill").cpu_affinity())
        decode = set(cluster.child("baton decode").cpu_affinity())
        assert prefill.isdisjoint(decode) and prefill | decode == set(cores)


def test_two_routers_serve_real_workers_as_one_and_either_may_die(tmp_path: Path) -> None:
    """They share the port: no client knows which of them it talks to."""
    with started(tmp_path, "--routers=2", "--prefill=2", "--decode=2") as cluster:
        cluster.wait_ready()
        cluster.wait(lambda: cluster.log.count("ready role=") == 6)
        expected = cluster.ask().json()["choices"]
        dying = cluster.child("-m router ")
        dying.kill()
        assert_gone([dying])  # until then its socket takes connections
        for _ in range(6):  # each on a connection of its own
            assert cluster.ask().json()["choices"] == expected
        cluster.wait(lambda: cluster.log.count("ready role=router") == 3)
        assert {cluster.ask().status_code for _ in range(6)} == {200}


def test_a_worker_process_changes_its_role_and_stays_the_same_process(tmp_path: Path) -> None:
    with started(tmp_path, "--decode=2") as cluster:
        cluster.wait_ready()
        cluster.wait(lambda: cluster.log.count("ready role=decode") == 2)
        expected, family = cluster.ask().json()["choices"], cluster.family()
        command = [sys.executable, "-m", "baton", "role", "decode-1", "prefill"]
        subprocess.run([*command, "--url", cluster.url], check=True, timeout=120)
        cluster.wait(lambda: "ready role=prefill id=decode-1" in cluster.log)
        assert {child.pid for child in cluster.family()} == {child.pid for child in family}
        drained = [sys.executable, "-m", "baton", "drain", "prefill-0", "--url", cluster.url]
        subprocess.run(drained, check=True, timeout=120)
        assert cluster.ask().json()["choices"] == expected, "by the only prefill worker left"
