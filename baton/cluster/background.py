"""Tasks that run as long as their service.

Such a task has no one who awaits it, so an error that it did not foresee would show only as a
service that no longer hears of workers, or is no longer heard of. It is told when it happens.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

_log = logging.getLogger(__name__)


def background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Starts it. The caller owns the task and cancels it."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_tell)
    return task


def _tell(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("%s has stopped, restart this process", task.get_name(), exc_info=error)
