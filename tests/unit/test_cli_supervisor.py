"""The supervisor over small children: restarts, stops, and nothing left behind."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from baton.cli.child_process import ChildSpec, describe_exit
from baton.cli.supervisor import RestartPolicy, Supervisor
from tests.support.redis import eventually, within

QUICK = RestartPolicy(first_s=0.01, limit_s=0.05, max_restarts=3, window_s=60)
SLEEP = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, name: str, line: str) -> None:
        self.lines.append((name, line))

    def count(self, text: str, name: str | None = None) -> int:
        return sum(text in line and name in (None, who) for who, line in self.lines)


def python(name: str, code: str, stage: int = 0) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", code), stop_stage=stage)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_children_start_together_their_lines_are_named_and_a_stop_ends_them() -> None:
    log = Log()
    supervisor = Supervisor([python("a", SLEEP), python("b", SLEEP)], log)
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: log.count("up") == 2)
    pids = supervisor.pids()
    assert set(pids) == {"a", "b"} and {name for name, _ in log.lines} == {"a", "b"}
    supervisor.stop()
    assert await within(30, running) is None
    assert all(gone(pid) for pid in pids.values()) and supervisor.pids() == {}


async def test_a_killed_child_is_started_again_and_that_is_said() -> None:
    log = Log()
    supervisor = Supervisor([python("a", SLEEP)], log, QUICK)
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: log.count("up") == 1)
    os.kill(supervisor.pids()["a"], signal.SIGKILL)
    await eventually(lambda: log.count("up") == 2)
    assert log.count("a was killed by SIGKILL; starting it again", "baton") == 1
    supervisor.stop()
    assert await within(30, running) is None


async def test_a_child_that_keeps_ending_is_given_up_and_everything_stops() -> None:
    log = Log()
    supervisor = Supervisor([python("bad", "raise SystemExit(1)"), python("a", SLEEP)], log, QUICK)
    failure = await within(20, supervisor.run())
    assert failure == "bad ended 4 times within 60 s; giving up."
    assert log.count("bad ended with code 1; starting it again") == 3
    assert supervisor.pids() == {}


async def test_a_configuration_error_stops_everything_with_its_sentence_and_no_restart() -> None:
    log = Log()
    code = "import sys; print('baton: too little memory', file=sys.stderr); sys.exit(2)"
    supervisor = Supervisor([python("bad", code), python("a", SLEEP)], log, QUICK)
    failure = await within(20, supervisor.run())
    assert failure == "bad cannot start: too little memory"
    assert log.count("starting it again") == 0


async def test_a_program_that_does_not_exist_is_a_sentence() -> None:
    supervisor = Supervisor([ChildSpec("ghost", ("/no/such/program",))], Log(), QUICK)
    failure = await within(30, supervisor.run())
    assert failure is not None and failure.startswith("ghost cannot be started:")


async def test_a_child_deaf_to_sigterm_is_killed_after_the_deadline() -> None:
    log = Log()
    supervisor = Supervisor([python("deaf", STUBBORN)], log, stop_timeout_s=0.3)
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: log.count("up") == 1)
    supervisor.stop()
    assert await within(30, running) is None
    assert log.count("killing deaf", "baton") == 1


async def test_a_second_stop_kills_at_once() -> None:
    log = Log()
    supervisor = Supervisor([python("deaf", STUBBORN)], log, stop_timeout_s=600)
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: log.count("up") == 1)
    supervisor.stop()
    await asyncio.sleep(0.1)
    assert not running.done()
    supervisor.stop()
    await within(60, running)


async def test_a_child_that_is_added_is_kept_and_one_that_is_removed_is_not() -> None:
    log = Log()
    supervisor = Supervisor([python("a", SLEEP)], log, QUICK)
    running = asyncio.create_task(supervisor.run())
    supervisor.add(python("b", SLEEP))
    await eventually(lambda: log.count("up") == 2)
    os.kill(supervisor.pids()["b"], signal.SIGKILL)
    await eventually(lambda: log.count("up", "b") == 2)
    pid = supervisor.pids()["b"]
    await within(30, supervisor.remove("b"))
    assert gone(pid) and supervisor.names() == ["a"] and not running.done()
    supervisor.add(python("b", SLEEP))
    await eventually(lambda: log.count("up", "b") == 3)
    supervisor.stop()
    assert await within(30, running) is None
    assert log.count("starting it again") == 1 and supervisor.pids() == {}


async def test_removing_a_child_that_waits_for_its_restart_is_immediate() -> None:
    log = Log()
    slow = RestartPolicy(first_s=600, limit_s=600)
    supervisor = Supervisor([python("bad", "raise SystemExit(1)")], log, slow)
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: log.count("starting it again") == 1)
    await within(30, supervisor.remove("bad"))
    assert supervisor.names() == []
    supervisor.stop()
    assert await within(30, running) is None


async def test_a_policy_without_a_limit_never_gives_up() -> None:
    log = Log()
    policy = RestartPolicy(first_s=0.001, limit_s=0.001, max_restarts=None)
    supervisor = Supervisor([python("bad", "raise SystemExit(1)")], log, policy)
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: log.count("starting it again") > 7)
    supervisor.stop()
    assert await within(30, running) is None


async def test_a_later_stage_is_stopped_only_when_the_earlier_one_is_gone() -> None:
    log = Log()
    slow = (
        "import signal, sys, time\n"
        "def end(*_):\n    time.sleep(0.4); print('ended', flush=True); sys.exit(0)\n"
        f"signal.signal(signal.SIGTERM, end)\n{SLEEP}"
    )
    quick = slow.replace("time.sleep(0.4); ", "")
    supervisor = Supervisor([python("worker", quick, stage=1), python("router", slow)], log)
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: log.count("up") == 2)
    supervisor.stop()
    await within(30, running)
    assert [name for name, line in log.lines if line == "ended"] == ["router", "worker"]


async def test_a_stop_during_the_wait_before_a_restart_is_immediate() -> None:
    log = Log()
    policy = RestartPolicy(first_s=600, limit_s=600)
    supervisor = Supervisor([python("bad", "raise SystemExit(1)")], log, policy)
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: log.count("starting it again") == 1)
    supervisor.stop()
    assert await within(30, running) is None


async def test_a_cancelled_supervisor_leaves_no_child() -> None:
    log = Log()
    supervisor = Supervisor([python("a", STUBBORN)], log)
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: log.count("up") == 1)
    pid = supervisor.pids()["a"]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert gone(pid)


async def test_grandchildren_end_with_their_parent(tmp_path: Path) -> None:
    log = Log()
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, sys, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))\n{SLEEP}"
    )
    supervisor = Supervisor([python("a", code)], log)
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: log.count("up") == 1)
    supervisor.stop()
    await within(30, running)
    await eventually(lambda: gone(int(pid_file.read_text())))


async def test_a_very_long_line_does_not_stop_the_log() -> None:
    log = Log()
    code = f"print('x' * 3_000_000); print('after', flush=True); {SLEEP}"
    supervisor = Supervisor([python("a", code)], log)
    running = asyncio.create_task(supervisor.run())
    await eventually(lambda: log.count("after") == 1)
    supervisor.stop()
    await within(30, running)


def test_waits_before_restarts_double_up_to_a_limit() -> None:
    policy = RestartPolicy(first_s=0.5, limit_s=10)
    assert [policy.wait_s(n) for n in range(6)] == [0.5, 1, 2, 4, 8, 10]


@pytest.mark.parametrize(
    ("code", "said"),
    [(0, "ended with code 0"), (-9, "was killed by SIGKILL"), (-99, "was killed by signal 99")],
)
def test_ends_are_described(code: int, said: str) -> None:
    assert describe_exit(code) == said
