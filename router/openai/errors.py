"""Errors as OpenAI clients expect them, and the one place where ours become HTTP statuses.

Invariant: an error body names what is wrong in one sentence and never shows a traceback or a
worker's own words about its fault.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import orjson

from baton.cluster.errors import BatonError, Overloaded, RequestRejected, WorkerUnavailable
from router.admission import QueueFull
from router.placement import NoWorker
from router.targets import Unattainable

_SHOWN_CHARS = 200


@dataclass
class ApiError(Exception):
    message: str
    status: int = 400
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    headers: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    """Further fields of the error object."""

    def body(self, request_id: str) -> bytes:
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
            "request_id": request_id,
            **self.details,
        }
        return orjson.dumps({"error": error})

    def all_headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return self.headers
        return {**self.headers, "retry-after": str(max(1, math.ceil(self.retry_after_s)))}


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    return ApiError(message, param=param, code=code)


def model_not_found(name: str) -> ApiError:
    shown = name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}…"
    return ApiError(
        f"The model `{shown}` does not exist.", 404, param="model", code="model_not_found"
    )


def unavailable(message: str, code: str) -> ApiError:
    return ApiError(message, 503, "service_unavailable_error", code=code, retry_after_s=1.0)


def internal(request_id: str) -> ApiError:
    return ApiError(
        f"Internal error; quote request id {request_id}.", 500, "server_error", code="internal"
    )


def timed_out() -> ApiError:
    message = "The request did not end within the time that it or the server allows."
    return ApiError(message, 504, "server_error", code="timeout")


def from_baton(error: BatonError, request_id: str) -> ApiError:
    if isinstance(error, RequestRejected):
        return invalid(None, str(error), "rejected_by_worker")
    if isinstance(error, Unattainable):
        return _unattainable(error)
    if isinstance(error, QueueFull):
        return ApiError(
            str(error),
            429,
            "rate_limit_error",
            code="queue_full",
            retry_after_s=error.retry_after_s,
        )
    if isinstance(error, Overloaded):
        return unavailable(str(error), "overloaded")
    if isinstance(error, NoWorker):
        return unavailable(str(error), f"no_{error.role}_worker")
    if isinstance(error, WorkerUnavailable):
        return unavailable(f"{error} Quote request id {request_id}.", "worker_failed")
    return internal(request_id)


def _unattainable(error: Unattainable) -> ApiError:
    predicted = {
        "ttft_ms": round(error.ttft_s * 1e3, 3),
        "tpot_ms": round(error.tpot_s * 1e3, 3),
    }
    return ApiError(
        str(error),
        429,
        "rate_limit_error",
        code="targets_unattainable",
        retry_after_s=error.retry_after_s,
        headers={
            "x-baton-predicted-ttft-ms": str(predicted["ttft_ms"]),
            "x-baton-predicted-tpot-ms": str(predicted["tpot_ms"]),
        },
        details={"predicted": predicted},
    )
