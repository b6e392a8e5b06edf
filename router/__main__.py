"""`python -m router`: settings, logging, the application, and uvicorn in one process."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn

from baton.cluster.errors import SettingsError
from baton.cluster.logging import configure
from baton.cluster.registry import Directory, Registry
from baton.cluster.settings import RouterSettings, fail, load_or_exit
from baton.store import resolve
from router.app import create_app
from router.gateway import Gateway
from router.serving import server_config
from router.shared import Shared
from router.text import TextModel, load_text_model

_log = logging.getLogger(__name__)


def main(settings: RouterSettings) -> int:
    """Serves until a signal; the exit code."""
    configure(settings.log_level, settings.log_json, "router")
    try:
        listener = _listen(settings.host, settings.port, settings.reuse_port)
    except SettingsError as error:
        return fail(error)
    with listener:
        return asyncio.run(_serve(settings, listener))


class _Server(uvicorn.Server):
    """A signal is an orderly end with exit code 0; a second one drops what still runs.

    uvicorn's own handlers would raise the signal again at the end.
    """

    _say: Callable[[], None] | None = None

    def when_listening(self, say: Callable[[], None]) -> None:
        """Now, or as soon as it listens."""
        if self.started:
            say()
        self._say = say

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._say is not None:
            self._say()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end)
        yield

    def _end(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


async def _serve(settings: RouterSettings, listener: socket.socket) -> int:
    failures: list[Exception] = []

    def say_ready() -> None:
        host, port = listener.getsockname()[:2]
        scheme = "https" if settings.ssl_certfile else "http"
        _log.info("ready role=router id=router address=%s://%s:%d", scheme, host, port)

    def on_loaded(failure: Exception | None) -> None:
        if failure is None:
            _settle()
            server.when_listening(say_ready)
        else:
            failures.append(failure)
            server.should_exit = True

    load_model: Callable[[], TextModel] = partial(_load_model, settings.model)
    if settings.reuse_port:
        # The port answers without this router: take no connection before it can serve one.
        try:
            model = await asyncio.to_thread(load_model)
        except Exception as error:
            return fail(error)
        load_model = lambda: model  # noqa: E731
    registry = Registry(settings.redis_url)
    shared = Shared(settings.redis_url)
    try:
        gateway = Gateway(settings, Directory(registry), load_model, shared)
        server = _Server(server_config(create_app(gateway, on_loaded), settings))
    except SettingsError as error:
        return fail(error)
    if not gateway.keys.required and not _is_loopback(settings.host):
        _log.warning("without API keys, whoever reaches %s may use this gateway", settings.host)
    try:
        await server.serve(sockets=[listener])
    finally:
        await registry.close()
    return fail(failures[0]) if failures else 0


def _settle() -> None:
    """What is loaded now stays until the end: the collector, which would walk through all of it
    every few hundred requests, leaves it out, and looks less often at what requests make.
    They leave hardly any cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def _listen(host: str, port: int, shared: bool) -> socket.socket:
    """Bound here, before anything is loaded, so that a taken port is said at once. A shared port's
    connections are dealt out by the kernel among the processes that listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named: with 0, the first token of a stream
    # waits for the acknowledgement of the response's headers, 40 ms on Linux.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"Cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host."
        ) from error
    return listener


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host in ("::1", "[::1]")


def _load_model(name: str) -> TextModel:
    stored = resolve(name)
    return load_text_model(stored.name, stored.path, stored.fingerprint)


if __name__ == "__main__":
    sys.exit(main(load_or_exit(RouterSettings, sys.argv[1:], "router")))
