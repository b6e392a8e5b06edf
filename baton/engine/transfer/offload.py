"""Copying bytes without holding up the event loop.

A short copy runs at once: handing it to a thread and back takes longer than the copy itself.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

AT_ONCE_BYTES = 1 << 20
"""About 0.2 ms of copying."""


async def copying(num_bytes: int, function: Callable[..., T], *args: object) -> T:
    """Calls a function that copies so many bytes. It has always ended when this returns or
    raises: a cancellation is obeyed after it, so the memory it uses may be given away."""
    if num_bytes <= AT_ONCE_BYTES:
        return function(*args)
    work = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            try:
                await asyncio.wait({work})
            except asyncio.CancelledError:
                continue
        if not work.cancelled():
            work.exception()  # seen; the cancellation is what is told
        raise
