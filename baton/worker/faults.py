"""The single place where a worker's exception becomes a gRPC status."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from baton.cluster.logging import current_request
from baton.engine.async_engine import EngineFailed
from baton.engine.block_manager import NoFreeBlocks
from baton.engine.scheduler import PrefixGone, QueueFull
from baton.engine.transfer.base import (
    HandoffDamaged,
    HandoffLost,
    HandoffRefused,
    TransportFailed,
)
from baton.worker.activity import Draining
from baton.worker.replies import RepliesEnded

log = logging.getLogger(__name__)


class LeaseExpired(Exception):
    """A reservation waited too long for its hand-off."""


_STATUS: list[tuple[type[Exception], grpc.StatusCode]] = [
    (NoFreeBlocks, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (QueueFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (PrefixGone, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Draining, grpc.StatusCode.UNAVAILABLE),
    (RepliesEnded, grpc.StatusCode.UNAVAILABLE),
    (LeaseExpired, grpc.StatusCode.DEADLINE_EXCEEDED),
    (HandoffRefused, grpc.StatusCode.FAILED_PRECONDITION),
    (HandoffDamaged, grpc.StatusCode.DATA_LOSS),
    (HandoffLost, grpc.StatusCode.ABORTED),
    (TransportFailed, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
    (EngineFailed, grpc.StatusCode.INTERNAL),
]


@asynccontextmanager
async def status_of_faults(
    context: grpc.aio.ServicerContext, request_id: str
) -> AsyncIterator[None]:
    """Ends the call with the status of a known fault; an unknown one is logged and INTERNAL."""
    token = current_request.set(request_id)
    try:
        yield
    except tuple(kind for kind, _ in _STATUS) as error:
        code = next(code for kind, code in _STATUS if isinstance(error, kind))
        log.info("request=%s refused: %s: %s", request_id, code.name, error)
        await context.abort(code, str(error))
    except (grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError):
        raise
    except Exception:
        log.exception("request=%s failed", request_id)
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; see the worker's log")
    finally:
        current_request.reset(token)
