"""Readers of the small notations that flags and files use: sizes, lists of cores, latency targets.

Pure functions from text to value; a ValueError's text completes "FIELD must be …".
"""

import re
from typing import NamedTuple

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("B", 1000), ("iB", 1024))
}
_UNITS_BY_LOWER = {unit.lower(): factor for unit, factor in _UNITS.items()}


def parse_size(text: str | int) -> int:
    """Bytes of "512MiB", "2G" (binary), "1.5GB" (decimal) or a plain number of bytes."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", str(text))
    factor = _UNITS_BY_LOWER.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError("a size such as 512MiB or 2GiB")
    return int(float(match[1]) * factor)


def format_size(num_bytes: float) -> str:
    """ "512.0 MiB"; for people, so not exact."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def parse_cores(text: str | tuple[int, ...] | list[int] | None) -> tuple[int, ...] | None:
    """Sorted cores of "0-1,3"; None stays None."""
    if text is None:
        return None
    if not isinstance(text, str):
        return tuple(sorted(set(text)))
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError("a list of cores such as 0-1,3")
        cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(cores))


def format_cores(cores: tuple[int, ...]) -> str:
    """The notation that `parse_cores` reads."""
    return ",".join(str(core) for core in cores)


class TargetValues(NamedTuple):
    """Latency targets in milliseconds and what happens when they cannot be met; None: not said."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    policy: str | None = None


_TARGET = re.compile(r"\s*([^=,\s]+)=([0-9.]+|-)/([0-9.]+|-)(?:/(best_effort|reject))?\s*")


def parse_targets(text: str) -> dict[str, TargetValues]:
    """Targets by name of "gold=500/50,free=5000/-/reject"."""
    targets: dict[str, TargetValues] = {}
    for part in filter(None, text.split(",")):
        match = _TARGET.fullmatch(part)
        if match is None:
            raise ValueError("a list such as gold=500/50,free=5000/-/reject")
        name, ttft, tpot, policy = match.groups()
        targets[name] = TargetValues(_millis(ttft), _millis(tpot), policy)
    return targets


def _millis(text: str) -> float | None:
    if text == "-":
        return None
    value = float(text) if text.count(".") < 2 else 0.0
    if not 0 < value <= 86_400_000:
        raise ValueError("a list whose milliseconds are above 0 and at most 86400000")
    return value
