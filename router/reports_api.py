"""`GET /v1/reports`: figures over the requests of the last hour, filtered; or the raw slots."""

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from baton.cluster.reports import Filters, build_report
from baton.cluster.reports.window import SPAN_S, merged
from router.access.caller import Caller, request_caller
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
        if raw:
            routers = [
                {"id": router, "slots": [slot.as_json() for slot in slots]}
                for router, slots in found.by_router.items()
            ]
            return json_response({"now": now, "routers": routers, "missing": found.missing})
        slots = [slot for of_one in found.by_router.values() for slot in of_one]
        if len(found.by_router) > 1:
            slots = merged(slots)
        shown = build_report(slots, Filters(model, tenant, worker), now)
        return json_response({**shown, "routers": len(found.by_router), "missing": found.missing})

    return api
