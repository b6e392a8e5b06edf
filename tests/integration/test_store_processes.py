"""Several processes on one store: two starting at once, and one killed in mid-conversion."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.store import ModelStore
from tests.support.models_on_disk import write_gguf

WAIT_S = 60
# Says "half" when part of the weights is on disk, then goes on when it may.
PROGRAM = """
import json, sys
from contextlib import contextmanager
from pathlib import Path
from baton.store import ModelStore

class Halting:
    def note(self, text):
        print("waiting", flush=True)
    @contextmanager
    def task(self, description, total):
        print("building", flush=True)
        done = 0
        def advance(size):
            nonlocal done
            before, done = done, done + size
            if before < total / 2 <= done:
                print("half", flush=True)
                sys.stdin.readline()
        yield advance

stored = ModelStore(Path(sys.argv[1]), Halting()).resolve(sys.argv[2])
print(json.dumps([stored.name, stored.fingerprint]), flush=True)
"""


class Process:
    """A process that resolves a model and halts half-way."""

    def __init__(self, home: Path, file: Path) -> None:
        command = [sys.executable, "-c", PROGRAM, str(home), str(file)]
        pipe = subprocess.PIPE
        self._popen = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def line(self) -> str:
        assert self._popen.stdout is not None
        return self._popen.stdout.readline().strip()

    def go_on(self) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write("\n")
        self._popen.stdin.flush()

    def result(self) -> Any:
        answer = json.loads(self.line())
        assert self._popen.wait(WAIT_S) == 0
        return answer

    def kill(self) -> None:
        os.kill(self._popen.pid, signal.SIGKILL)
        assert self._popen.wait(WAIT_S) == -signal.SIGKILL

    def close(self) -> None:
        self._popen.kill()
        self._popen.communicate(timeout=WAIT_S)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def pair(home: Path, file: Path) -> Iterator[tuple[Process, Process]]:
    """The first has half of the model written; the second wants the same one."""
    first = Process(home, file)
    try:
        assert (first.line(), first.line()) == ("building", "half")
        second = Process(home, file)
        try:
            assert second.line() == "waiting"
            yield first, second
        finally:
            second.close()
    finally:
        first.close()


def test_the_second_of_two_processes_uses_what_the_first_made(
    pair: tuple[Process, Process],
) -> None:
    first, second = pair
    first.go_on()
    assert first.result() == second.result()


def test_a_process_that_waited_takes_over_from_one_that_was_killed(
    pair: tuple[Process, Process],
) -> None:
    first, second = pair
    first.kill()
    assert (second.line(), second.line()) == ("building", "half")
    second.go_on()
    assert second.result()[0] == "tiny"


def test_a_kill_in_mid_conversion_leaves_nothing_half_usable(home: Path, file: Path) -> None:
    process = Process(home, file)
    try:
        assert (process.line(), process.line()) == ("building", "half")
        process.kill()
    finally:
        process.close()
    store = ModelStore(home)
    assert store.list() == []
    assert not (home / "models/tiny").exists()
    assert (home / "models/.scratch/tiny.new/model.safetensors").exists()
    stored = store.resolve(str(file))
    assert store.verify("tiny") == stored
    assert list((home / "models/.scratch").iterdir()) == []
