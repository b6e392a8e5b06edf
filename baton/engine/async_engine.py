"""An engine on a thread of its own, and its outputs as asyncio streams.

The thread steps while there is work and sleeps on the engine's condition otherwise. Each
request (group) has one stream; a stream holds at most the tokens its request may generate,
so it needs no other bound.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from baton.engine.engine import Engine, StepFailed
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import StepOutput

log = logging.getLogger(__name__)

S = TypeVar("S", bound=Scheduler)

_FAILED = "the engine has failed and computes nothing any more"


class EngineFailed(Exception):
    """The step that should have given this stream its tokens failed, or the engine as a whole."""


class Stream:
    """Outputs of one request, a list per step."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[list[StepOutput] | EngineFailed] = asyncio.Queue()

    def put(self, item: list[StepOutput] | EngineFailed) -> None:
        self._queue.put_nowait(item)

    async def next(self) -> list[StepOutput]:
        item = await self._queue.get()
        if isinstance(item, EngineFailed):
            raise item
        return item


class AsyncEngine(Generic[S]):
    """`start` inside a running event loop; `stop` joins the thread."""

    def __init__(self, engine: Engine[S]) -> None:
        self.engine = engine
        self.failed = False
        """The thread has ended by an error: nothing is computed any more."""
        self.on_failed: Callable[[], None] = lambda: None
        """Called on the event loop when that has come about."""
        self._streams: dict[int, Stream] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, timeout_s: float = 30.0) -> None:
        """Ends after the step that is running."""

        def set_stopping() -> None:
            self._stopping = True

        self.engine.apply(set_stopping)
        await asyncio.to_thread(self._thread.join, timeout_s)

    @contextmanager
    def stream(self, group: int) -> Iterator[Stream]:
        """The outputs of `group` while the context is open; on leaving, what is left of the
        group in the engine ends and its blocks go back. Raises EngineFailed when the engine as a
        whole has."""
        if self.failed:
            raise EngineFailed(_FAILED)
        stream = self._streams[group] = Stream()
        try:
            yield stream
        finally:
            del self._streams[group]
            self.engine.end(group)

    def publish(self, outputs: list[StepOutput]) -> None:
        """Puts outputs that no step made (a stopped choice) into their streams."""
        by_group: dict[int, list[StepOutput]] = {}
        for output in outputs:
            by_group.setdefault(output.seq.group, []).append(output)
        for group, mine in by_group.items():
            if group in self._streams:
                self._streams[group].put(mine)

    def _run(self) -> None:
        try:
            self._step_on()
        except Exception:  # of the books, not of the model: they may be wrong from here on
            log.exception(_FAILED)
            self.call(self._fail_all)

    def _step_on(self) -> None:
        while not self._stopping:
            version = self.engine.version
            try:
                outputs = self.engine.step()
            except StepFailed as failure:
                log.exception("a step failed", exc_info=failure.__cause__)
                self.call(self._fail, {seq.group for seq in failure.sequences})
                continue
            if outputs is None:
                self.engine.wait_for_change(version)
            elif outputs:
                self.call(self.publish, outputs)

    def call(self, function, *args) -> None:
        """Calls a function on the event loop; from any thread."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: nobody is left to read
            self._stopping = True

    def _fail(self, groups: set[int]) -> None:
        for group in groups & self._streams.keys():
            self._streams[group].put(EngineFailed("the engine could not compute a step"))
            # Choices outside the failed batch end with their request.
            self.engine.end(group)

    def _fail_all(self) -> None:
        self.failed = True
        for stream in self._streams.values():
            stream.put(EngineFailed(_FAILED))
        self.on_failed()
