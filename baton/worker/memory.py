"""How much memory this process may still take: what the machine or its container has left."""

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = CGROUP) -> int:
    """Free memory of the machine or of the control group (v2, else v1) that the container's root
    is, whichever is less. What a group has only cached of files counts as free."""
    free = int(psutil.virtual_memory().available)
    v1 = cgroup / "memory"
    for limit, used, stat, cached in (
        (cgroup / "memory.max", cgroup / "memory.current", cgroup / "memory.stat", "inactive_file"),
        (
            v1 / "memory.limit_in_bytes",
            v1 / "memory.usage_in_bytes",
            v1 / "memory.stat",
            "total_inactive_file",
        ),
    ):
        try:
            most, taken = limit.read_text().strip(), int(used.read_text())
            stats = dict(line.split() for line in stat.read_text().splitlines())
        except OSError:
            continue
        if most != "max":
            free = min(free, max(0, int(most) - taken + int(stats.get(cached, 0))))
        break
    return free
