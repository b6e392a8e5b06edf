"""An authority with a folder per role, and peers that should be refused."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import grpc.aio

from baton.cluster.tls import TlsFolder, authority
from baton.cluster.tls.folder import CA, channel_credentials
from baton.cluster.tls.peers import ROLES

HOSTS = ("127.0.0.1", "localhost")
DAY = timedelta(days=1)


def make_certificates(folder: Path, life: timedelta = DAY) -> Path:
    """`folder/ROLE` for every role."""
    authority.create(folder, timedelta(days=10))
    for role in ROLES:
        authority.issue(folder, folder / role, authority.Order(role, HOSTS, life))
    return folder


def dial(address: str, certificates: Path | None, role: str = "router") -> grpc.aio.Channel:
    if certificates is None:
        return grpc.aio.insecure_channel(address)
    return grpc.aio.secure_channel(
        address, channel_credentials(TlsFolder(certificates / role).latest())
    )


def stranger(folder: Path, trusted: Path) -> Path:
    """Certificates of another authority for who trusts the same one as the others."""
    make_certificates(folder)
    for role in ROLES:
        (folder / role / CA).write_bytes((trusted / CA).read_bytes())
    return folder


_SERVER = """
import asyncio, sys
from baton.cluster.tls import core_log
core_log.listen()
from pathlib import Path
from baton.cluster.logging import configure
from baton.cluster.rpc import make_server
from baton.cluster.tls import TlsFolder
configure(json=True)

async def main():
    server, port = await make_server([], "127.0.0.1:0", [], tls=TlsFolder(Path(sys.argv[1])))
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)

asyncio.run(main())
"""


class ServerProcess:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self.address = f"127.0.0.1:{process.stdout.readline().strip()}"
        self._process = process

    def stop(self) -> list[str]:
        """The warnings that it has logged; fails for any other line on its stderr."""
        _, errors = self._process.communicate("", timeout=20)
        records = [json.loads(line) for line in errors.splitlines()]
        return [record["message"] for record in records if record["level"] == "warning"]


@contextmanager
def server_process(tls_dir: Path) -> Iterator[ServerProcess]:
    """A worker's server, without a model, in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(tls_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield ServerProcess(process)
    finally:
        process.kill()
        process.communicate()
