"""Who may call what: the role that a caller's certificate names, checked before each call.

gRPC has verified the certificate by then. One of our authority that names no role, or a role that
has no business with a method, is refused and told in the log once, not at each try. Without a
handshake there is no call: what gRPC refuses there is told by `core_log`.

Source: SPIFFE, https://github.com/spiffe/spiffe/blob/main/standards/X509-SVID.md
"""

import functools
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from baton.cluster.once import Once

SPIFFE = "spiffe://baton/"
CALLERS = ("router", "prefill", "decode", "admin")
ROLES = (*CALLERS, "gateway", "redis")
"""The gateway's HTTPS and a Redis over TLS call nobody."""
_WORKER_CALLS = {
    "/baton.v1.Prefill/": ("router",),
    "/baton.v1.Decode/": ("router",),
    "/baton.v1.KVTransfer/": ("prefill",),
    "/baton.v1.Worker/Drain": ("router", "admin"),
    "/baton.v1.Worker/ChangeRole": ("admin",),
    "/baton.v1.Worker/GetCache": ("router", "admin"),
    "/baton.v1.Worker/Unpin": ("router", "admin"),
    "/baton.v1.Worker/FlushCache": ("router", "admin"),
    "/baton.v1.Worker/Replies": ("router",),
}
_log = logging.getLogger(__name__)


def allowed(method: str) -> tuple[str, ...]:
    """Roles that may call "/package.Service/Method"; health and such are for every role."""
    for prefix, roles in _WORKER_CALLS.items():
        if method.startswith(prefix):
            return roles
    return CALLERS


def role_of(auth: Any) -> str:
    """Of what `ServicerContext.auth_context` gives; empty for a certificate without a role."""
    return named_role(str(uri, "utf-8", "replace") for uri in auth.get("peer_uri", ()))


def named_role(uris: Iterable[str]) -> str:
    """Of the URIs of a certificate; empty when none is a SPIFFE id of ours."""
    return next((uri.removeprefix(SPIFFE) for uri in uris if uri.startswith(SPIFFE)), "")


class PeerGuard(grpc.aio.ServerInterceptor):
    """For a server that asks for certificates."""

    def __init__(self) -> None:
        self._told = Once()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        check = functools.partial(self._check, handler_call_details.method)
        return _Guarded(handler, check)

    async def _check(self, method: str, context: grpc.aio.ServicerContext) -> None:
        auth = context.auth_context()
        role = role_of(auth)
        if role in allowed(method):
            return
        subject = b"".join(auth.get("x509_subject", ())).decode(errors="replace")
        host = context.peer().rpartition(":")[0]
        if self._told.first((host, subject, method), time.monotonic()):
            _log.warning("peer=%s refused: %r has the role %r, for %s", host, subject, role, method)
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED, "your certificate is for other calls"
        )


class _Guarded(grpc.RpcMethodHandler):
    """A handler whose function is called after `check`."""

    def __init__(
        self,
        handler: Any,
        check: Callable[[grpc.aio.ServicerContext], Awaitable[None]],
    ) -> None:
        self.request_streaming = handler.request_streaming
        self.response_streaming = handler.response_streaming
        self.request_deserializer = handler.request_deserializer
        self.response_serializer = handler.response_serializer
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            function = getattr(handler, kind)
            setattr(self, kind, None if function is None else _after(check, function))


def _after(check: Callable[[Any], Awaitable[None]], function: Any) -> Any:
    if inspect.isasyncgenfunction(function):

        async def yields(request: Any, context: Any) -> AsyncIterator[Any]:
            await check(context)
            async for response in function(request, context):
                yield response

        return yields

    async def returns(request: Any, context: Any) -> Any:
        await check(context)
        return await function(request, context)

    return returns
