"""A second host for a benchmark: a network namespace behind a cable of a given rate.

Needs CAP_NET_ADMIN, and the `ip` and `tc` commands.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

_CLONE_NEWNET = 0x40000000


class Link(NamedTuple):
    """Addresses of both ends; `namespace` is the far one."""

    mine: str
    theirs: str
    namespace: str


LOOPBACK = Link("127.0.0.1", "127.0.0.1", "")


@contextmanager
def rated_link(rate: str) -> Iterator[Link]:
    """`rate`: of each direction, as `tc` writes it ("10gbit"). A queue of 50 ms, then loss."""
    name = f"bb{os.getpid()}"
    link = Link("10.198.51.1", "10.198.51.2", name)
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        there = ("ip", "netns", "exec", name)
        for prefix, device, address in (((), name, link.mine), (there, "eth0", link.theirs)):
            _run(*prefix, "ip", "addr", "add", f"{address}/24", "dev", device)
            _run(*prefix, "ip", "link", "set", device, "up")
            bucket = ("tbf", "rate", rate, "burst", "512kb", "latency", "50ms")
            _run(*prefix, "tc", "qdisc", "add", "dev", device, "root", *bucket)
        _run(*there, "ip", "link", "set", "lo", "up")
        yield link
    finally:
        _run("ip", "netns", "del", name)


def enter(link: Link) -> None:
    """Moves the calling thread, and what it starts, to the far host."""
    if not link.namespace:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{link.namespace}", "rb") as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {link.namespace}")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=20)
