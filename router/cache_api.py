"""`/v1/cache`: the prefix caches of all workers, what is pinned in them, and how to end that.

Asks every live worker at once; one that does not answer is listed with the name of what went wrong,
and its own words about it stay in the log.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
from fastapi import APIRouter, Depends, Response

from baton.cluster.workers import WorkerRecord
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from router.access.caller import admin_only
from router.gateway import Gateway
from router.openai.errors import ApiError
from router.responses import json_response

_log = logging.getLogger(__name__)
ANSWER_S = 5.0

Ask = Callable[[worker_pb2_grpc.WorkerStub], Awaitable[dict[str, Any]]]


def cache_api(gateway: Gateway) -> APIRouter:
    api = APIRouter(prefix="/v1/cache", dependencies=[Depends(admin_only)])

    @api.get("")
    async def show() -> Response:
        async def ask(stub: worker_pb2_grpc.WorkerStub) -> dict[str, Any]:
            found = await stub.GetCache(pb.GetCacheRequest(), timeout=ANSWER_S)
            counters = (await stub.GetInfo(pb.GetInfoRequest(), timeout=ANSWER_S)).counters
            return _shown(found, counters)

        return json_response({"object": "list", "data": await _all(gateway, ask)})

    @api.delete("/pins/{pin}")
    async def unpin(pin: str) -> Response:
        async def ask(stub: worker_pb2_grpc.WorkerStub) -> dict[str, Any]:
            answer = await stub.Unpin(pb.UnpinRequest(id=pin), timeout=ANSWER_S)
            return {"unpinned": answer.unpinned}

        answers = await _all(gateway, ask)
        if not any(answer.get("unpinned") or "error" in answer for answer in answers):
            raise ApiError(
                f"No worker has a pin {pin[:200]!r}.", 404, param="pin", code="not_found"
            )
        return json_response({"object": "list", "data": answers})

    @api.post("/flush")
    async def flush() -> Response:
        async def ask(stub: worker_pb2_grpc.WorkerStub) -> dict[str, Any]:
            answer = await stub.FlushCache(pb.FlushCacheRequest(), timeout=ANSWER_S)
            return {"flushed_blocks": answer.blocks}

        return json_response({"object": "list", "data": await _all(gateway, ask)})

    return api


async def _all(gateway: Gateway, ask: Ask) -> list[dict[str, Any]]:
    """One answer per live worker, each with its name and role."""

    async def one(worker: WorkerRecord) -> dict[str, Any]:
        name = {"worker": worker.worker_id, "role": str(worker.role)}
        stub = worker_pb2_grpc.WorkerStub(gateway.channels.get(worker.address))
        try:
            return name | await ask(stub)
        except grpc.aio.AioRpcError as error:
            _log.warning("worker %s: %s", worker.worker_id, error.details())
            return name | {"error": error.code().name}

    return list(await asyncio.gather(*map(one, gateway.directory.snapshot())))


def _shown(found: pb.CacheInfo, counters: pb.WorkerCounters) -> dict[str, Any]:
    return {
        "block_size": found.block_size,
        "known_blocks": found.known_blocks,
        "idle_blocks": found.idle_blocks,
        "pinned_blocks": found.pinned_blocks,
        "tenant_quota_blocks": found.tenant_quota_blocks,
        "reused_blocks": counters.blocks_reused,
        "evicted_blocks": counters.blocks_evicted,
        "pins_broken": counters.pins_broken,
        "pins": [
            {
                "id": pin.id,
                "tenant": pin.tenant,
                "tokens": pin.blocks * found.block_size,
                "cached_tokens": pin.cached_blocks * found.block_size,
                "expires_in_s": round(pin.expires_in_s, 1),
            }
            for pin in found.pins
        ],
    }
