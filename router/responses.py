"""JSON answers of the ordinary endpoints."""

from typing import Any

import orjson
from fastapi import Response

JSON_TYPE = "application/json"


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(
        orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS), status, headers, JSON_TYPE
    )
