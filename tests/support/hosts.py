"""Hosts of their own on one machine: network namespaces joined by a bridge, each with a link
that can be cut. The bridge has a namespace too, so the machine's own filters (Docker drops what is
forwarded) do not reach it. Where namespaces are not allowed, everything is on loopback.
"""

import itertools
import os
import re
import subprocess
from dataclasses import dataclass
from functools import lru_cache

_numbers = itertools.count(10)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@lru_cache
def namespaces_allowed() -> bool:
    """Needs CAP_NET_ADMIN and the `ip` command."""
    probe = f"bt{os.getpid()}h0"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "del", probe)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _sweep() -> None:
    """Removes what killed test runs have left."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        name = line.split()[0]
        owner = re.fullmatch(r"bt(\d+)[hs]\d+", name)
        if owner and not os.path.exists(f"/proc/{owner[1]}"):
            _ip("netns", "del", name)


@dataclass
class Host:
    """`prefix` goes before a command that shall run there. `link` is the other end of its cable,
    in the namespace `switch`."""

    address: str
    namespace: str = ""
    switch: str = ""
    link: str = ""

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace] if self.namespace else []

    def cut(self) -> None:
        """Nothing comes or goes, and nobody is told."""
        _ip("-n", self.switch, "link", "set", self.link, "down")

    def heal(self) -> None:
        _ip("-n", self.switch, "link", "set", self.link, "up")


class Network:
    """A bridge with the test at its address; `apart=False` puts every host on loopback."""

    def __init__(self, apart: bool) -> None:
        self.apart = apart
        self.address = "127.0.0.1"
        self._name = f"bt{os.getpid()}"
        self._subnet = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        self._switch = f"{self._name}s{next(_numbers)}"
        self._hosts: list[Host] = []

    def __enter__(self) -> "Network":
        if self.apart:
            _sweep()
            self.address = f"{self._subnet}.1"
            _ip("netns", "add", self._switch)
            self._in_switch("add", "name", "bridge", "type", "bridge")
            self._in_switch("set", "bridge", "up")
            _ip("link", "add", self._switch, *_cable("test", self._switch))
            self._in_switch("set", "test", "master", "bridge", "up")
            _ip("addr", "add", f"{self.address}/24", "dev", self._switch)
            _ip("link", "set", self._switch, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts:
            _ip("netns", "del", host.namespace)
        if self.apart:
            _ip("netns", "del", self._switch)

    def host(self) -> Host:
        if not self.apart:
            return Host(self.address)
        number = next(_numbers)
        namespace, link = f"{self._name}h{number}", f"{self._name}v{number}"
        address = f"{self._subnet}.{10 + len(self._hosts)}"
        host = Host(address, namespace, self._switch, link)
        _ip("netns", "add", namespace)
        self._hosts.append(host)
        self._in_switch("add", link, *_cable("eth0", namespace))
        self._in_switch("set", link, "master", "bridge", "up")
        _ip("-n", namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        return host

    def _in_switch(self, *words: str) -> None:
        _ip("-n", self._switch, "link", *words)


def _cable(other_end: str, namespace: str) -> list[str]:
    return ["type", "veth", "peer", "name", other_end, "netns", namespace]
