"""The C library's heap, set for a process through which messages of some MiB pass all the time."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _MMAP_BYTES = 64 << 20, 32 << 20


def keep_freed_memory() -> None:
    """Freed messages are used for the next ones instead of going back to the system, which would
    clear every page again. These are the most that glibc comes to by itself, after it has freed a
    block of 32 MiB (mallopt(3), "M_MMAP_THRESHOLD"). Other C libraries go on as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
