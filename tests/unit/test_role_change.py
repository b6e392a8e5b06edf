"""When a worker's life ends for another role, and when it does not."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.cluster.tls import TlsFolder
from baton.cluster.workers import Role
from baton.worker.activity import Activity
from baton.worker.role_change import RoleChange, RoleRefused
from tests.support.tls import make_certificates


@pytest.fixture
def decode() -> Any:
    return SimpleNamespace(role=Role.DECODE, activity=Activity(), announce=lambda: None)


async def test_it_ends_when_nothing_runs_any_more(decode: Any) -> None:
    change, stop = RoleChange(decode, Role), asyncio.Event()
    ends = asyncio.create_task(change.due_before(stop))
    with decode.activity.request():
        begun = asyncio.create_task(change.begin(Role.PREFILL, 60))
        await asyncio.sleep(0)
        assert decode.activity.draining and change.role is None and not ends.done()
    assert await begun and await ends
    assert change.role is Role.PREFILL


async def test_it_ends_when_the_time_is_up(decode: Any) -> None:
    change = RoleChange(decode, Role)
    with decode.activity.request():
        assert not await change.begin(Role.PREFILL, 0)
    assert change.role is Role.PREFILL


async def test_a_stop_comes_before_a_change(decode: Any) -> None:
    change, stop = RoleChange(decode, Role), asyncio.Event()
    with decode.activity.request():
        begun = asyncio.create_task(change.begin(Role.PREFILL, 60))
        stop.set()
        assert not await change.due_before(stop)
    await begun


@pytest.mark.parametrize("drained_before", [False, True])
async def test_a_change_that_nobody_waits_for_any_more_is_taken_back(
    decode: Any, drained_before: bool
) -> None:
    change = RoleChange(decode, Role)
    decode.activity.draining = drained_before
    decode.activity._running += 1
    decode.activity._idle.clear()
    begun = asyncio.create_task(change.begin(Role.PREFILL, 60))
    await asyncio.sleep(0)
    with pytest.raises(RoleRefused, match="changing its role already"):
        await change.begin(Role.PREFILL, 60)
    begun.cancel()
    await asyncio.gather(begun, return_exceptions=True)
    assert decode.activity.draining is drained_before and change.role is None
    assert not await change.begin(Role.PREFILL, 0), "and it can be asked for again"


async def test_it_is_refused_where_it_cannot_be(decode: Any, tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    refusals = {
        "a decode worker already": (RoleChange(decode, Role), Role.DECODE),
        "start it with `baton prefill`": (RoleChange(decode), Role.PREFILL),
        "its certificate is for decode": (
            RoleChange(decode, Role, TlsFolder(certificates / "decode")),
            Role.PREFILL,
        ),
    }
    for reason, (change, role) in refusals.items():
        with pytest.raises(RoleRefused, match=reason):
            await change.begin(role, 60)
    assert not decode.activity.draining
