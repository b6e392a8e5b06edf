"""`/dashboard`: one page, one style, one script, served as they are; no build and no network.

The page reads the router's own JSON (`/workers`, `/v1/reports`, `/v1/requests`), so it shows
nothing that a script could not read too.
"""

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter, Response

_FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'",
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
}


def dashboard_api() -> APIRouter:
    api = APIRouter(prefix="/dashboard")
    for path, (name, media_type) in _FILES.items():
        content = files(__package__).joinpath(name).read_bytes()
        api.add_api_route(path, _serving(content, media_type), methods=["GET"])
    return api


def _serving(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def serve() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return serve
