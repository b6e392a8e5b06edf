"""A lock between processes, held by an open file: the kernel frees it when the holder dies.

Waiting has a deadline and does not poll: a helper thread blocks in flock. If the deadline passes
first, that thread gives the lock back as soon as it gets it. Lock files are never deleted, since
a deleted one could be held by one process and created anew by another.
"""

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.store.errors import StoreError


class _Waiter:
    """Acquires in a thread of its own; exactly one of waiter and thread ends up owning the fd."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._mutex = threading.Lock()
        self._acquired = threading.Event()
        self._abandoned = False
        self._error: OSError | None = None

    def wait(self, timeout_s: float) -> bool:
        threading.Thread(target=self._run, name="store-lock", daemon=True).start()
        self._acquired.wait(timeout_s)
        with self._mutex:
            if self._error is not None:
                raise self._error
            self._abandoned = not self._acquired.is_set()
            return not self._abandoned

    def _run(self) -> None:
        error: OSError | None = None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        except OSError as caught:
            error = caught
        with self._mutex:
            if self._abandoned:
                os.close(self._fd)
            self._error = error
            self._acquired.set()


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def file_lock(
    path: Path, timeout_s: float, on_wait: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold the lock at `path`; `on_wait` is called once if another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    owned = True
    try:
        if not _try_lock(fd):
            on_wait()
            owned = _Waiter(fd).wait(timeout_s)
        if not owned:
            raise StoreError(
                f"Another process has held {path} for more than {timeout_s:g} s; "
                "wait until it has finished or stop it, then try again."
            )
        yield
    finally:
        if owned:
            os.close(fd)
