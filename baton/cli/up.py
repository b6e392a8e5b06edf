"""`baton up`: a whole cluster on this machine, in the foreground, until it is told to stop.

Settles everything that can be wrong before a child starts (settings, port, model, Redis), then
hands the children to the Supervisor and says when the router is ready. When it returns, and
even when it is killed, nothing that it started is left. With --ray the children run on a Ray
cluster: see the package `baton_ray`.
"""

import asyncio
import contextlib
import dataclasses
import errno
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import httpx

from baton.cli.console import MergedLog
from baton.cli.cores import available_cores
from baton.cli.ground import THIS_MACHINE, Ground
from baton.cli.supervisor import Say, Supervisor
from baton.cli.up_certs import ThrowAwayCertificates
from baton.cli.up_plan import Site, plan
from baton.cli.up_settings import UpSettings
from baton.cluster.errors import BatonError, RegistryUnavailable, SettingsError
from baton.cluster.redis_client import hide_password
from baton.cluster.redis_server import EmbeddedRedis
from baton.cluster.registry import Registry
from baton.cluster.settings_source import parse_flags

READY_POLL_S = 0.1
PROBE_TIMEOUT_S = 1.0
# Ctrl-C may arrive twice: from the terminal, and passed on by whoever started us.
SAME_REQUEST_S = 0.5
REDIS_TIMEOUT_S = 5.0


def up(argv: list[str]) -> int:
    """The exit code. Raises BatonError with a sentence when it cannot start."""
    # A background job of a script inherits "SIGINT ignored"; Ctrl-C must work all the same.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given = parse_flags(UpSettings, argv, "baton up")
    settings = UpSettings.build(**given)
    site = make_site(settings, given)
    if settings.ray is None:
        return asyncio.run(_run_here(settings, site, THIS_MACHINE))
    from baton.cli.on_ray import on_ray

    with on_ray(settings) as ground:
        return asyncio.run(_run_here(settings, site, ground))


def make_site(settings: UpSettings, given: dict[str, Any]) -> Site:
    """Checks port and model; Redis comes later. `given`: what is passed on as flags."""
    port = _claim_port(settings.host, settings.port)
    return Site("", port, _resolve_model(settings.model), available_cores(), given)


def _claim_port(host: str, port: int) -> int:
    """The port, checked to be free; a free one for 0."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        reason = "it is taken" if taken else (error.strerror or str(error)).lower()
        raise SettingsError(
            f"Cannot listen on {host}:{port}: {reason}; choose another --port."
        ) from error


def _resolve_model(model: str) -> str:
    """The model's name in the store, added there once rather than by every child."""
    from baton.store import StoreError, resolve  # imported late: `baton --help` stays fast

    try:
        return resolve(model).name
    except StoreError as error:
        raise BatonError(str(error)) from error


async def _run_here(settings: UpSettings, site: Site, ground: Ground) -> int:
    """In the foreground, until a signal."""
    names = [spec.name for spec in plan(settings, site)]
    log = MergedLog(names, raw=bool(settings.log_json))
    failure = await run(settings, site, ground, log.say, lambda s: _stop_on_signals(s, log.say))
    if failure is not None:
        raise BatonError(failure)
    log.say("baton", "stopped")
    return 0


async def run(
    settings: UpSettings,
    site: Site,
    ground: Ground,
    say: Say,
    started: Callable[[Supervisor], None],
) -> str | None:
    """Redis, unless one is named, and all processes, until `started`'s supervisor is stopped; why
    it could not go on, if so."""
    site = ground.settle(site)
    redis = ground.redis()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(ground.close)
        if settings.redis_url is None:
            stack.push_async_callback(redis.stop)
            url = await redis.start()
        else:
            url = settings.redis_url
            await _check_redis(url)
        site = dataclasses.replace(site, redis_url=url)
        helpers = []
        if settings.tls:
            certificates = stack.enter_context(ThrowAwayCertificates())
            site = dataclasses.replace(site, tls_dir=certificates.folder)
            helpers.append(certificates.keep())
        supervisor = Supervisor(
            plan(settings, site), say, ground.restarts, settings.stop_timeout_s, ground.start
        )
        started(supervisor)
        helpers += [_announce_ready(settings, site, say), *ground.helpers(supervisor, site, say)]
        if settings.redis_url is None:
            helpers.append(_keep_redis(redis, url, say))
        return await _with_helpers(supervisor, helpers)


async def _with_helpers(
    supervisor: Supervisor, helpers: Sequence[Coroutine[Any, Any, None]]
) -> str | None:
    tasks = [asyncio.create_task(helper) for helper in helpers]
    try:
        return await supervisor.run()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _check_redis(url: str) -> None:
    registry = Registry(url, timeout_s=REDIS_TIMEOUT_S)
    try:
        await registry.ping()
    except RegistryUnavailable as error:
        raise BatonError(
            f"Cannot reach the Redis of --redis {hide_password(url)}. {error}"
        ) from error
    finally:
        await registry.close()


def _stop_on_signals(supervisor: Supervisor, say: Say) -> None:
    loop = asyncio.get_running_loop()
    asked_at: float | None = None

    def ask() -> None:
        nonlocal asked_at
        if asked_at is not None and loop.time() < asked_at + SAME_REQUEST_S:
            return
        again, asked_at = asked_at is not None, loop.time()
        say("baton", "stopping at once" if again else "stopping; once more stops at once")
        supervisor.stop()

    loop.add_signal_handler(signal.SIGINT, ask)
    loop.add_signal_handler(signal.SIGTERM, ask)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup keeps it running
        loop.add_signal_handler(signal.SIGHUP, ask)


async def _announce_ready(settings: UpSettings, site: Site, say: Say) -> None:
    url = router_url(settings, site.port)
    started = time.monotonic()
    if site.tls_dir is not None:
        say("baton", f"mutual TLS; certificates are in {site.tls_dir}")
    say("baton", f"starting {settings.prefill} prefill and {settings.decode} decode workers")
    if absent := absent_roles(settings):
        say("baton", f"waiting for a {absent[0]} worker from elsewhere: none is started here")
    if await _is_ready(url, settings.ready_timeout_s):
        say("baton", f"Baton is ready at {url}")
        for line in sample_request(url, settings.served_model_name or site.model).splitlines():
            say("baton", line)
        say("baton", f"baton status --url {url}")
        say("baton", f"(after {time.monotonic() - started:.1f} s; Ctrl-C stops everything)")
    else:
        say("baton", f"not ready after {settings.ready_timeout_s:.0f} s; see the lines above")


def absent_roles(settings: UpSettings) -> list[str]:
    """Roles without which nothing is served, and which no worker of ours has."""
    needed = {"decode": settings.decode}
    if settings.decode_prefills == "never":
        needed["prefill"] = settings.prefill
    return [role for role, count in needed.items() if not count]


def router_url(settings: UpSettings, port: int, here: str = "127.0.0.1") -> str:
    """`here`: how a router is called that listens on all addresses of this machine."""
    host = here if settings.host in ("0.0.0.0", "::") else settings.host
    scheme = "https" if settings.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


async def _is_ready(url: str, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    # It is our own child, and its certificate is hardly for this address.
    client = httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False, verify=False)
    async with client:
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"{url}/health/ready")).status_code == 200:
                    return True
            await asyncio.sleep(READY_POLL_S)  # another process: there is nothing to wait on
    return False


def sample_request(url: str, model: str) -> str:
    return (
        f"curl {url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f'  -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}\''
    )


async def _keep_redis(redis: EmbeddedRedis, url: str, say: Say) -> None:
    port = int(url.rsplit(":", 1)[1].split("/")[0])
    while True:
        await redis.exited.wait()
        say("baton", "redis ended; starting it again")
        await redis.stop()
        try:
            await redis.start(port)
        except BatonError as error:
            say("baton", str(error))
            await asyncio.sleep(1.0)
