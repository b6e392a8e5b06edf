"""In front of the application: everything but health and the dashboard's files wants a key.

The dashboard's page is the same for everybody; what it shows it asks for, with a key.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from router.access.caller import SCOPE
from router.access.ring import KeyRing
from router.exchange import Exchange
from router.openai.errors import ApiError

_OPEN = ("/health", "/dashboard")


class Gate:
    """An ASGI middleware; who has passed it is `caller_of(scope)`."""

    def __init__(self, app: ASGIApp, ring: KeyRing) -> None:
        self._app = app
        self._ring = ring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        try:
            scope[SCOPE] = self._ring.caller(_authorization(scope))
        except ApiError as error:
            await Exchange(scope, receive, send).send_error(error)
            return
        await self._app(scope, receive, send)


def _authorization(scope: Scope) -> str | None:
    found = (value for name, value in scope["headers"] if name == b"authorization")
    value: bytes | None = next(found, None)
    return None if value is None else value.decode("latin-1")


def _is_open(path: str) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in _OPEN)
