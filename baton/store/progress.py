"""How the store tells a person what it is doing: a bar on a terminal, else one line, or nothing.

Writes to stderr only, so that stdout stays free for what a command prints.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

from baton.store.disk import Advance


class Reporter(Protocol):
    def note(self, text: str) -> None:
        """Say something once."""

    def task(self, description: str, total: int) -> AbstractContextManager[Advance]:
        """A piece of work of `total` bytes; call the result with the bytes just done."""


class SilentReporter:
    def note(self, text: str) -> None:
        """Nothing is shown."""

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Advance]:
        yield lambda _: None


class LineReporter:
    """One line per task: for logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Advance]:
        self.note(description)
        yield lambda _: None


class BarReporter:
    """A progress bar that vanishes when the task is done: for terminals."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Advance]:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        with Progress(
            *columns, TimeElapsedColumn(), console=Console(file=self._stream), transient=True
        ) as bar:
            task = bar.add_task(description, total=total)
            yield lambda size: bar.advance(task, size)


def make_reporter(progress: bool) -> Reporter:
    if not progress:
        return SilentReporter()
    return BarReporter(sys.stderr) if sys.stderr.isatty() else LineReporter(sys.stderr)
