"""The HTTP server around the application: uvicorn with a bound on headers, and TLS.

Certificates that are replaced count from the next connection on.
"""

import logging
import os
import ssl
from pathlib import Path
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.cluster.errors import SettingsError
from baton.cluster.settings import RouterSettings
from router.exchange import new_request_id
from router.openai.errors import ApiError

_log = logging.getLogger(__name__)
MAX_HEAD_BYTES = 64 << 10
# Longer than clients keep an idle connection (httpx, so the openai client: 5 s): one that is closed
# at the moment of its reuse is an error that the client did not earn.
KEEP_ALIVE_S = 75
SHUTDOWN_S = 10
_REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


def server_config(app: ASGIApp, settings: RouterSettings) -> uvicorn.Config:
    """Loaded. Raises SettingsError when the certificate cannot be read."""
    config = uvicorn.Config(
        app,
        http=BoundedHead,
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    if settings.ssl_certfile is not None:
        config.ssl = FollowingContext(settings.ssl_certfile, settings.ssl_keyfile).context
    return config


class BoundedHead(HttpToolsProtocol):
    """Refuses a request line and headers of more than MAX_HEAD_BYTES, complete or not. httptools
    itself has no bound."""

    _in_head = True
    _received = 0
    """While the head is not complete."""
    _parsed = 0
    _ended = False
    """Whether a message has ended in the data at hand: the beginning of it is no head."""

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._received > MAX_HEAD_BYTES:
            self.send_400_response("")
            return
        self._ended = False
        super().data_received(data)
        if self._in_head and not self._ended:
            self._received += len(data)

    def on_message_begin(self) -> None:
        self._in_head, self._received, self._parsed = True, 0, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._received, self._ended = True, 0, True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """As the other errors look; the id is always a new one, since who knows whose headers these
        were."""
        error = ApiError("This is not valid HTTP.", 400, code="invalid_http")
        if max(self._parsed, self._received) > MAX_HEAD_BYTES:
            error = ApiError(
                f"The headers are larger than {MAX_HEAD_BYTES >> 10} KiB.",
                431,
                code="headers_too_large",
            )
        request_id = new_request_id()
        body = error.body(request_id)
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"x-request-id: %s\r\nconnection: close\r\n\r\n%s"
            % (error.status, _REASONS[error.status], len(body), request_id.encode(), body)
        )
        self.transport.close()

    def _count(self, size: int) -> None:
        """Raises into httptools, which ends in `send_400_response`."""
        self._parsed += size
        if self._parsed > MAX_HEAD_BYTES:
            raise httptools.HttpParserError("too many bytes before the body")


class FollowingContext:
    """A server's TLS context; each handshake looks whether the files have changed."""

    def __init__(self, certfile: Path, keyfile: Path | None) -> None:
        self._files = (certfile, keyfile)
        self._stamp = self._stamp_now()
        try:
            self._current = self._load()
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(f"--ssl-certfile {certfile} cannot be used: {error}.") from error
        self.context = self._load()
        self.context.sni_callback = self._choose

    def _choose(self, connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        stamp = self._stamp_now()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._current = self._load()
            except (OSError, ssl.SSLError) as error:
                _log.error("the old certificate of the gateway stays: %s", error)
        connection.context = self._current

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(*self._files)
        return context

    def _stamp_now(self) -> tuple[int, ...]:
        found = [os.stat(path) for path in self._files if path is not None and path.exists()]
        return tuple(number for stat in found for number in (stat.st_mtime_ns, stat.st_size))
