"""`python -m decode_service --flags`: one decode worker."""

import sys
from functools import partial

from baton.cluster.logging import configure
from baton.cluster.rpc import AddServicer
from baton.cluster.settings import DecodeSettings, load_or_exit
from baton.cluster.tls import core_log
from baton.cluster.tls.folder import open_tls
from baton.cluster.workers import Role, new_incarnation
from baton.engine.async_engine import AsyncEngine
from baton.engine.decode_scheduler import DecodeScheduler
from baton.v1 import decode_pb2_grpc
from baton.worker.activity import Activity
from baton.worker.boot import Parts, boot
from baton.worker.lifecycle import StopSignals, run_worker, serve
from baton.worker.replies import ReplyStreams
from baton.worker.status import WorkerStatus
from decode_service.inbox import Inbox
from decode_service.server import DecodeServicer
from decode_service.transfer import KVTransferServicer
from decode_service.worker import DecodeWorker


async def serve_decode(
    settings: DecodeSettings, parts: Parts[DecodeScheduler], signals: StopSignals
) -> Role | None:
    """Runs one decode worker in this event loop; see `serve`."""
    engine, activity = AsyncEngine(parts.engine), Activity()
    worker = DecodeWorker(engine, parts.cache, activity, settings.lease_s)
    status = WorkerStatus(Role.DECODE, settings, new_incarnation(), parts, activity)
    inbox = Inbox(settings, parts.cache.layout, parts.cache.data.device.type)
    activity.transfers.resources = inbox.resources
    replies = ReplyStreams()
    decode = DecodeServicer(worker, status, parts.vocab_size, inbox, replies)
    transfer = KVTransferServicer(
        worker, inbox, parts.cache.layout, status.incarnation, settings.lease_s
    )
    servicers: list[AddServicer] = [
        partial(decode_pb2_grpc.add_DecodeServicer_to_server, decode),
        transfer.add_to,
    ]
    names = ["baton.v1.Decode", "baton.v1.KVTransfer"]
    try:
        tls = open_tls(settings.tls_dir)
        return await serve(status, engine, replies, servicers, names, signals, tls)
    finally:
        inbox.close()


def main(settings: DecodeSettings) -> int:
    """Exit status: 0 after an orderly stop, 2 when the settings cannot work."""
    if settings.tls_dir is not None:
        core_log.listen()
    configure(settings.log_level, settings.log_json, settings.worker_id)
    return run_worker(lambda: boot(settings, DecodeScheduler), partial(serve_decode, settings))


if __name__ == "__main__":
    sys.exit(main(load_or_exit(DecodeSettings, sys.argv[1:], "decode_service")))
