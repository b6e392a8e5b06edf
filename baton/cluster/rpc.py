"""gRPC as every process uses it: channel options, a pool of channels, a server with health.

Owns connections, keepalive and the mapping of a failed call to our errors. Knows no message of
our own. A peer that is stopped or cut off is noticed, on either side, by its silence on HTTP/2
pings; one that is dead by its closed connections.
"""

import time
from collections.abc import Callable, Iterable, Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.cluster.background import background
from baton.cluster.errors import (
    BatonError,
    Overloaded,
    RequestRejected,
    SettingsError,
    WorkerUnavailable,
)
from baton.cluster.tls.folder import Material, TlsFolder, channel_credentials
from baton.cluster.tls.peers import PeerGuard

PEER_TIMEOUT_S = 3.0
MAX_MESSAGE_BYTES = 1 << 30
RETIRED_S = 3600.0
"""A channel with an old certificate serves its calls for so long; none is that old."""
_MESSAGE_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]
_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_MESSAGE_OPTIONS,
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted worker is reached again at once, not after gRPC's 2-minute backoff.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
_SERVER_OPTIONS: list[tuple[str, int]] = [
    *_MESSAGE_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    # Two workers on one port would silently share it.
    ("grpc.so_reuseport", 0),
]


def _ping_options(peer_timeout_s: float) -> list[tuple[str, int]]:
    """A ping per third of the timeout, half of it for the answer: the rest is for being late."""
    return [
        # Also while no call runs: a server never hears that a client gave up beyond a cut link.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", max(1, int(1000 * peer_timeout_s / 3))),
        ("grpc.keepalive_timeout_ms", max(1, int(1000 * peer_timeout_s / 2))),
        ("grpc.http2.ping_timeout_ms", max(1, int(1000 * peer_timeout_s / 2))),
    ]


AddServicer = Callable[[grpc.aio.Server], None]


def open_channel(
    address: str, tls: TlsFolder | None = None, options: Iterable[tuple[str, str | int]] = ()
) -> grpc.aio.Channel:
    """With `tls`, one that shows our certificate and asks for the other's."""
    options = list(options)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(address, channel_credentials(tls.latest()), options=options)


class ChannelPool:
    """One channel per address, opened on first use. The pool owns and closes them. Callers ask
    for each call: after a change of certificates they get another one."""

    def __init__(
        self, peer_timeout_s: float = PEER_TIMEOUT_S, tls: TlsFolder | None = None
    ) -> None:
        self._options = [*_CHANNEL_OPTIONS, *_ping_options(peer_timeout_s)]
        self._tls = tls
        self._material: Material | None = tls.latest() if tls else None
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._retired: list[tuple[float, grpc.aio.Channel]] = []

    def get(self, address: str) -> grpc.aio.Channel:
        if self._tls is not None and self._tls.latest() is not self._material:
            self._material = self._tls.latest()
            self._retire_all(time.monotonic())
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address, self._tls, self._options)
        return channel

    async def drop(self, address: str) -> None:
        """Closes the channel of a worker that is gone; calls still on it end."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        for address in list(self._channels):
            await self.drop(address)
        for _, channel in self._retired:
            await channel.close()

    def _retire_all(self, now: float) -> None:
        """Calls that run go on; their channels are closed when none can be left."""
        over = [channel for since, channel in self._retired if since + RETIRED_S <= now]
        self._retired = [old for old in self._retired if old[1] not in over]
        self._retired += [(now, channel) for channel in self._channels.values()]
        self._channels = {}
        for channel in over:
            background(channel.close(), name="close-retired-channel")


async def make_server(
    servicers: Iterable[AddServicer],
    address: str,
    service_names: Sequence[str],
    peer_timeout_s: float = PEER_TIMEOUT_S,
    tls: TlsFolder | None = None,
) -> tuple[grpc.aio.Server, int]:
    """An unstarted server on `address` ("host:0" picks a port) and its port. With `tls` it takes
    calls of other processes of the cluster only, each those that are its business.

    Each of `servicers` adds itself, e.g. `partial(add_PrefillServicer_to_server, servicer)`.
    Health answers SERVING for "" and every name in `service_names`; reflection lists them.
    """
    options = [*_SERVER_OPTIONS, *_ping_options(peer_timeout_s)]
    server = grpc.aio.server(interceptors=[PeerGuard()] if tls else (), options=options)
    for add_to in servicers:
        add_to(server)
    await _add_health(server, service_names)
    names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, tls.server_credentials())
    except RuntimeError:
        port = 0
    if port == 0:
        raise SettingsError(
            f"Cannot listen on {address}: the port is taken or the host is not of this machine; "
            "choose another --port or --host."
        )
    return server, port


async def _add_health(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for name in ("", *service_names):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)


def refusal(error: grpc.aio.AioRpcError) -> str | None:
    """Why there is no trust between us and the peer, if that is what the error says."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return f"it refuses our certificate: {details}"
    if code is grpc.StatusCode.UNAVAILABLE and "andshake failed" in details:
        return f"the TLS handshake failed: {details.rpartition('OPENSSL_internal:')[2]}"
    if "failed to connect" in details and "Socket closed" in details:
        return "it ends the handshake: it does not accept our certificate, or wants one"
    return None


_OVERLOADED = {grpc.StatusCode.RESOURCE_EXHAUSTED}
_REJECTED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNIMPLEMENTED,
}


def error_from_rpc(error: grpc.aio.AioRpcError, peer: str) -> BatonError:
    """The error a caller reacts to; raise it `from` the original."""
    code, details = error.code(), error.details() or "no details"
    if code in _OVERLOADED:
        return Overloaded(f"{peer} has no room: {details}", retry_after_s=1.0)
    if code in _REJECTED:
        return RequestRejected(details)
    return WorkerUnavailable(f"{peer} failed ({code.name}): {details}")
