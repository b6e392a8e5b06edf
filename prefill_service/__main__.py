"""`python -m prefill_service --flags`: one prefill worker."""

import sys
from functools import partial

from baton.cluster.logging import configure
from baton.cluster.rpc import ChannelPool
from baton.cluster.settings import PrefillSettings, load_or_exit
from baton.cluster.tls import core_log
from baton.cluster.tls.folder import open_tls
from baton.cluster.workers import Role, new_incarnation
from baton.engine.async_engine import AsyncEngine
from baton.engine.prefill_scheduler import PrefillScheduler
from baton.v1 import prefill_pb2_grpc
from baton.worker.activity import Activity
from baton.worker.boot import Parts, boot
from baton.worker.lifecycle import StopSignals, run_worker, serve
from baton.worker.replies import ReplyStreams
from baton.worker.status import WorkerStatus
from prefill_service.pairs import Pairs
from prefill_service.server import PrefillServicer
from prefill_service.worker import PrefillWorker


async def serve_prefill(
    settings: PrefillSettings, parts: Parts[PrefillScheduler], signals: StopSignals
) -> Role | None:
    """Runs one prefill worker in this event loop; see `serve`."""
    engine, activity = AsyncEngine(parts.engine), Activity()
    tls = open_tls(settings.tls_dir, settings.tls_server_name)
    channels = ChannelPool(settings.peer_timeout_s, tls)
    pairs = Pairs(settings, parts.cache, channels, parts.memory)
    activity.transfers.links, activity.transfers.resources = pairs.links, pairs.resources
    worker = PrefillWorker(engine, parts.cache.layout, activity)
    replies = ReplyStreams()
    servicer = PrefillServicer(worker, pairs, parts.vocab_size, replies)
    add = partial(prefill_pb2_grpc.add_PrefillServicer_to_server, servicer)
    status = WorkerStatus(Role.PREFILL, settings, new_incarnation(), parts, activity)
    try:
        names = ["baton.v1.Prefill"]
        return await serve(status, engine, replies, [add], names, signals, tls)
    finally:
        await pairs.close()
        await channels.close()


def main(settings: PrefillSettings) -> int:
    """Exit status: 0 after an orderly stop, 2 when the settings cannot work."""
    if settings.tls_dir is not None:
        core_log.listen()
    configure(settings.log_level, settings.log_json, settings.worker_id)
    return run_worker(lambda: boot(settings, PrefillScheduler), partial(serve_prefill, settings))


if __name__ == "__main__":
    sys.exit(main(load_or_exit(PrefillSettings, sys.argv[1:], "prefill_service")))
