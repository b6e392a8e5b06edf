"""A background task that ends by an error nobody foresaw."""

import asyncio
import logging

import pytest

from baton.cluster.background import background


async def broken() -> None:
    raise ZeroDivisionError("by a worker's zero")


async def test_an_error_is_told_at_once_with_the_name_of_the_task(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = background(broken(), name="directory-poll")
    await asyncio.wait({task})
    (record,) = caplog.records
    assert record.levelno == logging.CRITICAL
    assert "directory-poll has stopped" in record.message
    assert "by a worker's zero" in caplog.text


async def test_the_end_of_a_service_is_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    task = background(asyncio.sleep(60), name="directory-poll")
    task.cancel()
    await asyncio.wait({task})
    assert not caplog.records
