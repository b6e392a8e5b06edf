"""Which cores each worker gets: the cores this process may use, shared out in contiguous runs.

Pure arithmetic besides `available_cores`. With fewer cores than workers, workers share.
"""

import os


def available_cores() -> tuple[int, ...]:
    """The cores this process may run on; numbered from 0 where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def share_cores(cores: tuple[int, ...], workers: int) -> list[tuple[int, ...]]:
    """One run of cores per worker; earlier workers get the odd ones."""
    if workers >= len(cores):
        return [(cores[index % len(cores)],) for index in range(workers)]
    size, odd = divmod(len(cores), workers)
    shares, start = [], 0
    for index in range(workers):
        end = start + size + (index < odd)
        shares.append(cores[start:end])
        start = end
    return shares
