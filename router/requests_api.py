"""`GET /v1/requests`: the requests that ended lately, and where the time of each went."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from router.access.caller import Caller, request_caller
from router.gateway import Gateway
from router.openai.errors import ApiError
from router.responses import json_response

MAX_LISTED = 1000
Asking = Annotated[Caller, Depends(request_caller)]


def requests_api(gateway: Gateway) -> APIRouter:
    api = APIRouter(prefix="/v1/requests")

    @api.get("")
    async def recent(
        caller: Asking, limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 50
    ) -> Response:
        """Newest first, without their phases; of one's own tenant, or for an admin of all."""
        rows, missing = await gateway.everywhere.recent(limit, _whose(caller))
        return json_response({"object": "list", "data": rows, "missing": missing})

    @api.get("/{name}")
    async def one(caller: Asking, name: str) -> Response:
        """By the request's id (`x-request-id`) or the id of its answer."""
        found, missing = await gateway.everywhere.find(name, _whose(caller))
        if found is None:
            unasked = f" Not asked: {'; '.join(missing)}." if missing else ""
            raise ApiError(
                f"No recent request has the id {name[:200]!r}.{unasked}",
                404,
                param="id",
                code="not_found",
            )
        return json_response(found)

    return api


def _whose(caller: Caller) -> str | None:
    """The tenant whose requests it may read; None: everybody's."""
    return None if caller.admin else caller.tenant("")
