"""`GET /v1/reports`: figures over the requests of the last hour, filtered; or the raw slots."""

import asyncio
import time
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from baton.cluster.reports import Filters, build_report
from baton.cluster.reports.window import SPAN_S, merged
from router.access.caller import Caller, request_caller
from router.everywhere import Slots, slots_as_json
from router.gateway import Gateway
from router.responses import json_response

Name = Annotated[str, Query(max_length=200)]


def reports_api(gateway: Gateway) -> APIRouter:
    api = APIRouter(prefix="/v1/reports")

    @api.get("")
    async def report(
        caller: Annotated[Caller, Depends(request_caller)],
        window: Annotated[float, Query(gt=0, le=SPAN_S)] = SPAN_S,
        model: Name = "",
        tenant: Name = "",
        worker: Name = "",
        raw: bool = False,
    ) -> Response:
        """`window` in seconds, back from now. `raw`: what `baton report` merges over clusters. Who
        is no admin gets the figures of its own tenant."""
        found, now = await gateway.everywhere.slots(window), time.time()
        if not caller.admin:
            tenant, raw = caller.tenant(tenant), False
        # On a thread: thousands of sketches take longer than a token may wait.
        if raw:
            return await asyncio.to_thread(_raw, found, now)
        filters = Filters(model, tenant, worker)
        return await asyncio.to_thread(_report, found, filters, now)

    return api


def _raw(found: Slots, now: float) -> Response:
    routers = [
        {"id": router, "slots": slots_as_json(slots)} for router, slots in found.by_router.items()
    ]
    return json_response({"now": now, "routers": routers, "missing": found.missing})


def _report(found: Slots, filters: Filters, now: float) -> Response:
    slots = [slot for of_one in found.by_router.values() for slot in of_one]
    if len(found.by_router) > 1:
        slots = merged(slots)
    shown = build_report(slots, filters, now)
    return json_response({**shown, "routers": len(found.by_router), "missing": found.missing})
