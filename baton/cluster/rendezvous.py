"""Rendezvous hashing: an order of names for a key that every process computes alike.

When a name comes or goes, only the keys that it was or becomes first for move. Source: Thaler
and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
"""

import hashlib
from collections.abc import Iterable


def rendezvous(key: bytes, names: Iterable[str]) -> list[str]:
    """The names, best first."""
    return sorted(names, key=lambda name: (_weight(key, name), name), reverse=True)


def _weight(key: bytes, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), key=key[:64], digest_size=8).digest()
