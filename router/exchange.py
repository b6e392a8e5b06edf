"""One HTTP exchange at ASGI level: body in, JSON or an event stream out, client watched.

Owns request ids, the body limit and the notice that the client has left; knows nothing of what
is served. Invariant: headers go out once, and not before there is something to send.
"""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from starlette.types import Receive, Scope, Send

from router.openai.errors import ApiError

MAX_BODY_BYTES = 16 << 20
# A body up to here is read to its end and thrown away, so that the client reads the refusal.
MAX_DISCARDED_BYTES = 4 * MAX_BODY_BYTES
BODY_TIMEOUT_S = 60.0
LAST_WORDS_S = 1.0
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


class ClientGone(Exception):
    """The client closed its side; nobody reads the answer."""


def request_id_of(scope: Scope) -> str:
    """The client's own id when it is plain text of a sane length, else a new one: two ids that are
    cut may be the same."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            if _REQUEST_ID.fullmatch(value):
                return str(value, "ascii")
            break
    return new_request_id()


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


class Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.request_id = request_id_of(scope)
        self.started = False
        self.status = 0
        self._headers = dict(reversed(scope["headers"]))
        self._receive = receive
        self._send = send

    def header(self, name: str) -> str | None:
        """The first one of that (lower-case) name."""
        value = self._headers.get(name.encode())
        return None if value is None else str(value, "latin-1").strip()

    async def read_body(self) -> bytes:
        """Raises ApiError when it is too large or too slow, ClientGone when it breaks off."""
        length = self._headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > MAX_DISCARDED_BYTES:
            raise _too_large()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._read_all()
        except TimeoutError as error:
            raise ApiError("The body did not arrive in time.", 408, code="body_timeout") from error

    async def _read_all(self) -> bytes:
        pieces: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            size += len(piece)
            if size > MAX_DISCARDED_BYTES:
                raise _too_large()
            if size <= MAX_BODY_BYTES:
                pieces.append(piece)
            more = message.get("more_body", False)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        return b"".join(pieces)

    @asynccontextmanager
    async def while_client_waits(self) -> AsyncIterator[None]:
        """Cancels the work inside as soon as the client leaves, and raises ClientGone.

        A client that closes only its sending half counts as gone: the server closes the
        connection then. Enter after the body has been read.
        """
        task = asyncio.current_task()
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await self._receive())["type"] != "http.disconnect":
                continue
            gone = True
            if task is not None:
                task.cancel()

        watcher = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if gone and task is not None and task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            watcher.cancel()

    async def send_json(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        length = {"content-length": str(len(body)), **(headers or {})}
        await self._start(status, "application/json", length)
        await self._send({"type": "http.response.body", "body": body})

    async def send_error(self, error: ApiError) -> None:
        await self.send_json(error.status, error.body(self.request_id), error.all_headers())

    async def send_events(self, events: bytes, last: bool = False) -> None:
        """Sends whole events; the first call sends the headers too. Waits for a slow client."""
        if not self.started:
            await self._start(
                200, "text/event-stream; charset=utf-8", {"cache-control": "no-cache"}
            )
        await self._send({"type": "http.response.body", "body": events, "more_body": not last})

    async def break_events(self, events: bytes) -> None:
        """Ends a stream that went wrong. A client that has stopped reading does not get to hear
        of it: the server closes the connection."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self.send_events(events, last=True)

    async def _start(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        self.started = True
        self.status = status
        lines = {"content-type": content_type, "x-request-id": self.request_id, **headers}
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(k.encode(), v.encode("latin-1")) for k, v in lines.items()],
            }
        )


def _too_large() -> ApiError:
    limit = MAX_BODY_BYTES >> 20
    return ApiError(
        f"The body is larger than {limit} MiB.",
        413,
        code="body_too_large",
        headers={"connection": "close"},
    )
