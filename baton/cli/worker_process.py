"""`baton prefill` and `baton decode`: one worker process, which may go on in the other role.

The weights stay in memory. All the rest is made anew around them: KV pool, scheduler, engine,
service, incarnation, and the registration under it.
"""

import gc
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.cluster.errors import SettingsError
from baton.cluster.logging import configure
from baton.cluster.settings import DecodeSettings, PrefillSettings, WorkerSettings
from baton.cluster.tls import core_log
from baton.cluster.workers import Role
from baton.engine.decode_scheduler import DecodeScheduler
from baton.engine.prefill_scheduler import PrefillScheduler
from baton.engine.scheduler import Scheduler
from baton.worker.boot import Loaded, Parts, boot
from baton.worker.lifecycle import StopSignals, run_worker
from decode_service.__main__ import serve_decode
from prefill_service.__main__ import serve_prefill

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Kind:
    settings: type[WorkerSettings]
    scheduler: type[Scheduler]
    serve: Callable[[Any, Parts[Any], StopSignals], Awaitable[Role | None]]


_KINDS = {
    Role.PREFILL: _Kind(PrefillSettings, PrefillScheduler, serve_prefill),
    Role.DECODE: _Kind(DecodeSettings, DecodeScheduler, serve_decode),
}


def run(settings: WorkerSettings) -> int:
    """Exit status: 0 after an orderly stop, 2 when the settings cannot work."""
    if settings.tls_dir is not None:
        core_log.listen()
    configure(settings.log_level, settings.log_json, settings.worker_id)
    kind = _KINDS[Role(settings.table)]
    return run_worker(lambda: boot(settings, kind.scheduler), partial(live, settings), _KINDS)


async def live(settings: WorkerSettings, parts: Parts[Any], signals: StopSignals) -> None:
    """Serves in the role of `settings`, then in each that is asked for, until a stop signal."""
    while True:
        loaded = parts.loaded
        role = await _KINDS[Role(settings.table)].serve(settings, parts, signals)
        if role is None:
            return
        # Before the next pool is made, the memory of this one has to be free.
        del parts
        gc.collect()
        settings, parts = _in_role(settings, loaded, role)


def _in_role(
    settings: WorkerSettings, loaded: Loaded, role: Role
) -> tuple[WorkerSettings, Parts[Any]]:
    """The old role again where the new one cannot be."""
    kind = _KINDS[role]
    try:
        changed = settings_in(settings, kind.settings)
        return changed, boot(changed, kind.scheduler, loaded)
    except SettingsError as error:
        _log.error("cannot be a %s worker and goes on as before: %s", role, error)
    return settings, boot(settings, _KINDS[Role(settings.table)].scheduler, loaded)


def settings_in(settings: WorkerSettings, kind: type[WorkerSettings]) -> WorkerSettings:
    """Of the same worker in another role: what only that one has comes from BATON_* and the TOML
    file. Raises SettingsError."""
    return kind.build(**{name: getattr(settings, name) for name in WorkerSettings.model_fields})
