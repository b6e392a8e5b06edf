"""How much memory this process may still take: what the machine or its container has left."""

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
_V2 = ("memory.max", "memory.current", "memory.stat", "inactive_file")
_V1 = (
    "memory/memory.limit_in_bytes",
    "memory/memory.usage_in_bytes",
    "memory/memory.stat",
    "total_inactive_file",
)
"""Files of the limit, of what is used and of the statistics, and there what files have cached."""


def available_bytes(cgroup: Path = CGROUP) -> int:
    """Free memory of the machine or of the control group that the container's root is, whichever
    is less. What a group has only cached of files counts as free."""
    free = int(psutil.virtual_memory().available)
    for limit, used, stat, cached in (_V2, _V1):
        try:
            most, taken = (cgroup / limit).read_text().strip(), int((cgroup / used).read_text())
            stats = dict(line.split() for line in (cgroup / stat).read_text().splitlines())
        except OSError:
            continue  # not this version, or no limit at the machine's own root
        if most != "max":
            free = min(free, max(0, int(most) - taken + int(stats.get(cached, 0))))
        break
    return free
