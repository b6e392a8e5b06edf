"""A client for every kind of Redis that a URL can name, and calls that end in time.

| URL | Redis |
|---|---|
| `redis://user:password@host:6379/0`, `rediss://…`, `unix:///path` | a server; over TLS; a socket |
| `redis+sentinel://user:password@host:26379,host:26379/SERVICE/0` | what Sentinel says is master |
| `redis+cluster://user:password@host:6379,host:6379` | a Redis Cluster |

`rediss+sentinel` and `rediss+cluster` are the same over TLS. Options such as `?ssl_ca_certs=/path`
are those of redis-py. Nothing here retries: whoever calls decides.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis.asyncio as aioredis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ClusterError, RedisError, ResponseError

from baton.cluster.errors import RegistryRefused, RegistryUnavailable

CALL_TIMEOUT_S = 0.5
LISTEN_S = 5.0
SCHEMES = (
    *(f"redis{tls}{kind}://" for kind in ("", "+sentinel", "+cluster") for tls in ("", "s")),
    "unix://",
)
_DEFAULT_PORTS = {"sentinel": 26379, "cluster": 6379}

T = TypeVar("T")
Client = Any
"""redis-py's Redis or RedisCluster: they share the commands, not a type."""


def connect(url: str, timeout_s: float = CALL_TIMEOUT_S) -> Client:
    """A client; connects when first used. Raises ValueError when the URL cannot be read."""
    if not url.startswith(SCHEMES):
        raise ValueError(f"it begins with none of {', '.join(SCHEMES)}")
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "health_check_interval": 5,
    }
    kind = urlsplit(url).scheme.partition("+")[2]
    if kind == "sentinel":
        return _sentinel(url, options)
    if kind == "cluster":
        return _cluster(url, options)
    # `answer` bounds every call; a bound of the client's own costs each a task and a timer. Only
    # where there are several servers, one that is silent must leave time for the next.
    options["socket_timeout"] = None
    return aioredis.Redis.from_url(url, retry=_no_retry(), **options)


async def close(client: Client) -> None:
    """Closes every connection, those to the Sentinels included."""
    await client.aclose()
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    for sentinel in manager.sentinels if manager is not None else ():
        await sentinel.aclose()


def hide_password(url: str) -> str:
    """The URL as it may be shown and logged."""
    return re.sub(r"(?<=://)([^:/@]*):[^@]*@", r"\1:***@", url)


async def answer(call: Awaitable[T] | Any, timeout_s: float = CALL_TIMEOUT_S) -> T:
    """The result of a call. Raises RegistryRefused when Redis says no, as one that is read-only
    or full does, and RegistryUnavailable when it says nothing in time."""
    task = asyncio.current_task()
    cancels = task.cancelling() if task else 0
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except (RedisError, OSError, TimeoutError) as error:
        reason = str(error) or f"no answer within {timeout_s:g} s"
        if isinstance(error, ResponseError) and not isinstance(error, ClusterError):
            raise RegistryRefused(f"Redis refuses: {reason}") from error
        raise RegistryUnavailable(f"Redis is not available: {reason}") from error
    finally:
        # The client waits with asyncio.wait_for, which loses a cancellation that meets a result.
        if task and task.cancelling() > cancels:
            raise asyncio.CancelledError


async def messages(client: Client, *channels: str) -> AsyncGenerator[tuple[str, bytes], None]:
    """(channel, data) of every message, after one ("", b"") once subscribed, until Redis goes
    away: then RegistryUnavailable."""
    pubsub = client.pubsub(ignore_subscribe_messages=True)
    try:
        await answer(pubsub.subscribe(*channels))
        yield "", b""
        while True:
            # None after the wait; the next one also sends the connection's health check.
            message: Any = await answer(
                pubsub.get_message(timeout=LISTEN_S), LISTEN_S + CALL_TIMEOUT_S
            )
            if message is not None:
                yield message["channel"].decode(), message["data"]
    finally:
        await pubsub.aclose()


def _sentinel(url: str, options: dict[str, Any]) -> Client:
    hosts, kwargs = _parse(url, "sentinel")
    service, _, database = urlsplit(url).path.strip("/").partition("/")
    if not service:
        raise ValueError("a Sentinel URL ends in /SERVICE, the name of the master")
    kwargs |= {"db": _number(database or "0", "database"), **options}
    tls = {name: value for name, value in kwargs.items() if name.startswith("ssl")}
    sentinel = Sentinel(hosts, sentinel_kwargs={**options, **tls}, retry=_no_retry(), **kwargs)
    return sentinel.master_for(service)


def _cluster(url: str, options: dict[str, Any]) -> Client:
    hosts, kwargs = _parse(url, "cluster")
    nodes = [ClusterNode(host, port) for host, port in hosts]
    return RedisCluster(startup_nodes=nodes, retry=_no_retry(), **kwargs, **options)


def _parse(url: str, kind: str) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """The hosts, and the connection's keyword arguments as redis-py reads them."""
    parts = urlsplit(url)
    scheme = parts.scheme.partition("+")[0]
    user, at, hosts = parts.netloc.rpartition("@")
    query = f"?{parts.query}" if parts.query else ""
    kwargs = dict(parse_url(f"{scheme}://{user}{at}host{query}"))
    kwargs.pop("host"), kwargs.pop("connection_class", None)
    if scheme == "rediss":
        kwargs["ssl"] = True
    return [_host(host, kind) for host in hosts.split(",")], kwargs


def _host(text: str, kind: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":") if ":" in text else (text, "", "")
    if not host:
        raise ValueError("a host is missing")
    return host, _number(port, "port") if port else _DEFAULT_PORTS[kind]


def _number(text: str, what: str) -> int:
    if not text.isdigit():
        raise ValueError(f"{text!r} is not a {what}")
    return int(text)


def _no_retry() -> Retry:
    return Retry(NoBackoff(), 0)
