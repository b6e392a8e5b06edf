"""A process on some node of the cluster, as the supervisor sees it.

Owns one actor from its request for a place to its end. A lost actor or node is an end like any
other: the supervisor starts the process again, where there is room. A place that is lost before the
process is there (Ray may still count on a node that has just died) is asked for again.
"""

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from baton.cli.child_process import ChildSpec
from baton.cli.supervisor import CONFIGURATION_ERROR, Say
from baton_ray.process import Place

NO_ROOM_SAID_S = 15.0
ASK_AGAIN_S = 1.0
LOST = 1


class RayChild:
    """`make_actor` asks for a place. `proven`: the configuration has worked before, so what is
    wrong now is the node."""

    def __init__(
        self, spec: ChildSpec, make_actor: Callable[[], Any], needs: str, proven: bool
    ) -> None:
        self.spec = spec
        self.last_line = ""
        self.place: Place | None = None
        self._make_actor = make_actor
        self._actor = make_actor()
        self._needs = needs
        self._proven = proven
        self._stopped = False

    @property
    def pid(self) -> int:
        """On its node; 0 until it has one."""
        return self.place.pid if self.place else 0

    async def follow(self, say: Say) -> int:
        """The exit code; LOST when the actor or its node is gone."""
        try:
            self.place = await self._placed(say)
            say("baton", f"{self.spec.name} runs on {self.place.host}")
            code, self.last_line = await self._actor.wait.remote()
        except RayError as error:
            say("baton", f"{self.spec.name} is lost: {_first_line(error)}")
            return LOST
        return LOST if self._proven and code == CONFIGURATION_ERROR else code

    def signal(self, number: signal.Signals) -> None:
        """What has no place yet has nothing to finish."""
        self._stopped = True
        if number == signal.SIGKILL or self.place is None:
            ray.kill(self._actor)
        else:
            self._actor.signal.remote(int(number))

    async def _placed(self, say: Say) -> Place:
        while True:
            place = asyncio.ensure_future(asyncio.wrap_future(self._actor.start.remote().future()))
            while not (await asyncio.wait({place}, timeout=NO_ROOM_SAID_S))[0]:
                say("baton", f"{self.spec.name} waits for room in the Ray cluster: {self._needs}")
            try:
                return place.result()
            except ActorDiedError:
                if self._stopped:
                    raise
            await asyncio.sleep(ASK_AGAIN_S)  # Ray tells nobody when it has seen a node die
            self._actor = self._make_actor()


def _first_line(error: RayError) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
