"""Baton as a Ray Serve application: `serve run baton_ray.serve_app:build prefill=2 decode=2`.

One replica supervises the cluster as the driver of `baton up --ray` does. Requests go to the
router's own port: Serve's HTTP only tells where that is, so that no token passes through Ray.
"""

import asyncio
import contextlib
import logging
from typing import Any

from ray import serve
from ray.util import get_node_ip_address
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from baton.cli.supervisor import Supervisor
from baton.cli.up import make_site, router_url, run
from baton.cli.up_settings import UpSettings
from baton_ray.placer import Placer, this_node
from baton_ray.session import ray_ground

PORT = 8100  # Serve's own is 8000
STOP_S = 60.0
_log = logging.getLogger("ray.serve")


@serve.deployment(
    name="baton",
    num_replicas=1,
    ray_actor_options={"num_cpus": 0},
    graceful_shutdown_timeout_s=STOP_S,
)
class Baton:
    def __init__(self, given: dict[str, Any]) -> None:
        here = get_node_ip_address()
        given = {"host": here} | given
        self._settings = UpSettings.build(**given)
        site = make_site(self._settings, given)
        self._router = router_url(self._settings, site.port, here)
        self._placer = Placer(self._settings, this_node())
        self._supervisor: Supervisor | None = None
        ground = ray_ground(self._settings, self._placer, local=False)
        self._running = asyncio.get_running_loop().create_task(
            run(self._settings, site, ground, self._say, self._started)
        )

    def _started(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def _say(self, name: str, line: str) -> None:
        _log.info("%s: %s", name, line)

    def check_health(self) -> None:
        """Serve replaces a replica that raises here."""
        if self._running.done():
            raise RuntimeError(f"Baton has ended: {self._running.result() or 'stopped'}")

    async def __call__(self, request: Request) -> Response:
        """The root tells what runs where; all else is the router's."""
        if request.url.path != "/":
            query = f"?{request.url.query}" if request.url.query else ""
            return RedirectResponse(f"{self._router}{request.url.path}{query}", 307)
        places = {
            name: child.place.host if child.place else None
            for name, child in self._placer.children.items()
        }
        return JSONResponse({"router": self._router, "processes": places})

    async def __del__(self) -> None:
        if self._supervisor is not None:
            self._supervisor.stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._running


def build(args: dict[str, Any]) -> serve.Application:
    """`args`: settings of `baton up`, as its flags are called, with underscores. Raises
    SettingsError."""
    given = {"ray": "auto", "port": PORT} | args
    UpSettings.build(**given)
    return Baton.bind(given)  # type: ignore[attr-defined]
