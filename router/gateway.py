"""What the HTTP side shares: settings, the model once it is loaded, the conductor, the workers.

Starts and stops the background parts of the router. Until the model is loaded every request is
answered 503; liveness is never affected.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from baton.cluster.background import background
from baton.cluster.registry import RegistryState
from baton.cluster.rpc import ChannelPool
from baton.cluster.settings import RouterSettings
from baton.cluster.tls.folder import open_tls
from baton.cluster.workers import Role, WorkerRecord
from router.access import KeyRing
from router.admission import Admission
from router.conductor import Conductor
from router.dialer import Dialer
from router.everywhere import Everywhere
from router.ledgers import Ledgers
from router.metrics import RouterMetrics
from router.openai.errors import unavailable
from router.openai.prepare import Limits, limits_of
from router.placement import POLICIES, Rules
from router.planner import Planner
from router.selection import Selection
from router.shared import Shared
from router.targets import DefaultTargets
from router.text import TextModel

LoadModel = Callable[[], TextModel]
OnLoaded = Callable[[Exception | None], None]
# Without news from the directory the next in line is let through this often.
RETRY_QUEUE_S = 0.5


class WorkerDirectory(Protocol):
    """The cluster's Directory, as far as the router uses it."""

    @property
    def state(self) -> RegistryState: ...
    def snapshot(self) -> tuple[WorkerRecord, ...]: ...
    @property
    def doubted(self) -> bool: ...
    def suspect(self, worker_id: str, incarnation: str) -> None: ...
    async def wait_changed(self, timeout_s: float) -> None: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...


class Gateway:
    """`load_model` runs on a thread while liveness is already answered."""

    def __init__(
        self,
        settings: RouterSettings,
        directory: WorkerDirectory,
        load_model: LoadModel,
        shared: Shared | None = None,
    ) -> None:
        self.settings = settings
        self.directory = directory
        tls = open_tls(settings.tls_dir, settings.tls_server_name)
        self.channels = ChannelPool(settings.peer_timeout_s, tls)
        self.admission = Admission(settings.max_running, settings.max_queue)
        self.shared = shared or Shared()
        self.planner = Planner(
            POLICIES[settings.policy](),
            Rules(settings.decode_prefills, settings.prefill_backlog_s),
            loads=self.shared.ledger,
            slow_start_s=settings.slow_start_s,
        )
        self.planner.on_room = self.admission.workers_changed
        self.keys = KeyRing(settings.api_keys, settings.api_keys_file, self.shared.limits)
        self.metrics = RouterMetrics(self.admission, self.planner)
        self.ledgers = Ledgers(settings, self.metrics)
        self.everywhere = Everywhere(self.ledgers, self.shared.ledger.router_id, self.shared.bus)
        self.default_targets = DefaultTargets(settings)
        self.model: TextModel | None = None
        self.created = int(time.time())
        self._load_model = load_model
        self._conductor: Conductor | None = None
        self._limits: tuple[Sequence[WorkerRecord], Limits] | None = None
        """Of these workers: they change with a heartbeat, not with a request."""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, on_loaded: OnLoaded) -> None:
        """`on_loaded` is called once, with what went wrong if the model cannot be loaded; on a
        shared port before this returns, since that is when the kernel deals out connections."""
        await self.directory.start()
        await self.shared.start()
        self._tasks = [
            asyncio.create_task(self._load(on_loaded), name="load-model"),
            background(self._follow_workers(), name="follow-workers"),
        ]
        if self.settings.reuse_port:
            await self._tasks[0]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.shared.stop()
        await self.directory.stop()
        await self.channels.close()
        await asyncio.to_thread(self.ledgers.close)
        if self.model is not None:
            self.model.close()

    async def _load(self, on_loaded: OnLoaded) -> None:
        try:
            self.model = await asyncio.to_thread(self._load_model)
        except Exception as error:  # whatever it is, the process must say it and end
            on_loaded(error)
            return
        self._conductor = Conductor(
            selection=Selection(
                self.model.fingerprint, self.planner, self.directory, self.shared.index
            ),
            planner=self.planner,
            workers=self.directory,
            dialer=Dialer(self.channels),
            admission=self.admission,
            metrics=self.metrics,
            settings=self.settings,
        )
        on_loaded(None)

    async def _follow_workers(self) -> None:
        """News of workers may mean room; channels of workers that are gone are closed."""
        last_seen: dict[str, float] = {}
        while True:
            await self.directory.wait_changed(RETRY_QUEUE_S)
            now = time.monotonic()
            self.planner.saw_workers(self.directory.snapshot(), now)
            self.admission.workers_changed()
            self.ledgers.sample_pools(self.directory.snapshot())
            last_seen.update((worker.address, now) for worker in self.directory.snapshot())
            # No call can be that old: closing a channel ends the calls that are still on it.
            oldest = now - self.settings.request_timeout_s
            for address in [a for a, seen in last_seen.items() if seen < oldest]:
                del last_seen[address]
                await self.channels.drop(address)

    @property
    def served_name(self) -> str:
        if self.settings.served_model_name:
            return self.settings.served_model_name
        return self.model.name if self.model else self.settings.model

    def ready_model(self) -> tuple[TextModel, Conductor]:
        if self.model is None or self._conductor is None:
            raise unavailable("The model is still loading.", "loading")
        return self.model, self._conductor

    @property
    def degraded(self) -> bool:
        """Redis is away or takes no writes: workers may be late to be known, prefixes are not."""
        connected = self.directory.state is RegistryState.CONNECTED
        return not connected or not self.shared.healthy

    def limits(self, model: TextModel) -> Limits:
        workers = self.directory.snapshot()
        if self._limits is None or self._limits[0] is not workers:
            self._limits = workers, limits_of(model, workers)
        return self._limits[1]

    def missing_roles(self, needed: Collection[Role] = tuple(Role)) -> list[str]:
        """Roles that no live worker of this model fills."""
        present = {
            worker.role
            for worker in self.directory.snapshot()
            if not worker.load.draining
            and (self.model is None or worker.layout.fingerprint == self.model.fingerprint)
        }
        return [str(role) for role in needed if role not in present]

    @property
    def needed_roles(self) -> Collection[Role]:
        """Without these nothing can be served."""
        return tuple(Role) if self.settings.decode_prefills == "never" else (Role.DECODE,)
