"""The HTTP application: paths, health, metrics, and OpenAI-shaped answers to wrong paths.

Generating endpoints are plain ASGI applications in front of FastAPI, each layer of which would wrap
every chunk that they send; everything else is ordinary FastAPI.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.access import Gate
from router.access.caller import admin_only
from router.cache_api import cache_api
from router.dashboard import dashboard_api
from router.exchange import request_id_of
from router.gateway import Gateway, OnLoaded
from router.openai import errors
from router.openai.endpoint import CHAT, COMPLETIONS, Endpoint
from router.openai.errors import ApiError
from router.reports_api import reports_api
from router.requests_api import requests_api
from router.responses import JSON_TYPE, json_response


def create_app(gateway: Gateway, on_loaded: OnLoaded) -> ASGIApp:
    """`on_loaded`: see `Gateway.start`, which runs when the application starts."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.start(on_loaded)
        try:
            yield
        finally:
            await gateway.stop()

    app = FastAPI(title="Baton", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False
    app.add_exception_handler(HTTPException, _wrong_path)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _wrong_query)
    app.add_exception_handler(Exception, _unexpected)
    endpoints = {
        "/v1/chat/completions": Endpoint(gateway, CHAT),
        "/v1/completions": Endpoint(gateway, COMPLETIONS),
    }
    for path, endpoint in endpoints.items():  # for other methods: 405
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
    _add_models(app, gateway)
    _add_health(app, gateway)
    app.include_router(requests_api(gateway))
    app.include_router(cache_api(gateway))
    app.include_router(reports_api(gateway))
    app.include_router(dashboard_api())
    gated = Gate(_Generating(app, endpoints), gateway.keys)
    origins = [origin for origin in gateway.settings.cors_origins.split(",") if origin]
    if not origins:
        return gated
    return CORSMiddleware(  # in front of the gate: a browser asks without a key whether it may ask
        gated,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )


class _Generating:
    """POST requests to generating endpoints go to these, everything else to `app`."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["method"] == "POST":
            app = self._endpoints.get(scope["path"], app)
        await app(scope, receive, send)


def _add_models(app: FastAPI, gateway: Gateway) -> None:
    def description() -> dict[str, Any]:
        model, _ = gateway.ready_model()
        limit = gateway.limits(model).total
        return {
            "id": gateway.served_name,
            "object": "model",
            "created": gateway.created,
            "owned_by": "baton",
            "max_model_len": limit,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [description()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != gateway.served_name:
            raise errors.model_not_found(name)
        return json_response(description())


def _add_health(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health/live")
    async def live() -> Response:
        return json_response({"status": "ok"})

    @app.get("/health")
    @app.get("/health/ready")
    async def ready() -> Response:
        missing, absent = gateway.missing_roles(gateway.needed_roles), gateway.missing_roles()
        loading = gateway.model is None
        registry = gateway.directory.state
        if not loading and not missing:
            well = not gateway.degraded and not absent
            state: dict[str, Any] = {"status": "ok" if well else "degraded", "registry": registry}
            return json_response(state | ({"missing": absent} if absent else {}))
        reasons = ["the model is still loading"] if loading else []
        reasons += [f"no {role} worker is available" for role in missing]
        content = {
            "status": "unavailable",
            "reason": "; ".join(reasons),
            "missing": missing,
            "registry": registry,
        }
        return json_response(content, 503, {"retry-after": "1"})

    @app.get("/workers", dependencies=[Depends(admin_only)])
    async def workers() -> Response:
        """The live workers as this router sees them; `baton status` reads it."""
        return json_response({"workers": gateway.directory.snapshot()})

    @app.get("/metrics", dependencies=[Depends(admin_only)])
    async def metrics() -> Response:
        content, content_type = gateway.metrics.render()
        return Response(content, media_type=content_type)


async def _wrong_path(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    reasons = {
        404: f"There is no {request.url.path[:200]} here.",
        405: f"{request.method} is not allowed for {request.url.path[:200]}.",
    }
    message = reasons.get(status, "The request cannot be handled.")
    return _api_error_response(request, ApiError(message, status, headers=headers))


async def _wrong_query(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    wrong = errors.invalid(name, f"Invalid value for {name}: {first['msg']}.", "invalid_value")
    return _api_error_response(request, wrong)


async def _api_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return _api_error_response(request, error)


async def _unexpected(request: Request, _: Exception) -> Response:
    return _api_error_response(request, errors.internal(request_id_of(request.scope)))


def _api_error_response(request: Request, error: ApiError) -> Response:
    request_id = request_id_of(request.scope)
    headers = {**error.all_headers(), "x-request-id": request_id}
    return Response(error.body(request_id), error.status, headers, JSON_TYPE)
