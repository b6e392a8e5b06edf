"""What a request says about its latency: headers and the `slo` object of the body.

Headers go over the body, so that a proxy can set them. Everything is checked here; an error
names the header or field.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.cluster.values import TargetValues
from router.openai.errors import ApiError, invalid

MIN_MILLIS, MAX_MILLIS = 0.001, 86_400_000
MAX_PRIORITY = 100
_NUMBER = re.compile(r"[0-9]{1,16}(\.[0-9]{1,16})?([eE][+-]?[0-9]{1,3})?")
"""Of what Python takes for a number, only this: no 1_000, no digits of other scripts."""
_TENANT = re.compile(r"[!-~]{1,128}")

Millis = Annotated[float, Field(ge=MIN_MILLIS, le=MAX_MILLIS, allow_inf_nan=False)]
Header = Callable[[str], str | None]


class Slo(BaseModel):
    """`slo` in a body. None means absent."""

    model_config = ConfigDict(strict=True, extra="forbid")
    ttft_ms: Millis | None = None
    tpot_ms: Millis | None = None
    policy: Literal["best_effort", "reject"] | None = None


@dataclass(frozen=True)
class Wishes:
    """What stands beside the text to generate. An empty tenant is the one of all who name none."""

    targets: TargetValues = field(default_factory=TargetValues)
    priority: int = 0
    tenant: str = ""
    explain: bool = False


def wishes(header: Header, slo: Slo | None) -> Wishes:
    """`header` gives the value of a lower-case name. Raises ApiError."""
    body = slo or Slo()
    ttft_ms = _millis(header, "x-baton-ttft-ms")
    tpot_ms = _millis(header, "x-baton-tpot-ms")
    return Wishes(
        TargetValues(
            body.ttft_ms if ttft_ms is None else ttft_ms,
            body.tpot_ms if tpot_ms is None else tpot_ms,
            body.policy,
        ),
        _priority(header("x-baton-priority")),
        _tenant(header("x-baton-tenant")),
        _switch(header("x-baton-explain"), "x-baton-explain"),
    )


def _millis(header: Header, name: str) -> float | None:
    text = header(name)
    if text is None:
        return None
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not MIN_MILLIS <= value <= MAX_MILLIS:
        raise _wrong(name, f"a number of milliseconds from {MIN_MILLIS} to {MAX_MILLIS}")
    return value


def _priority(text: str | None) -> int:
    if text is None:
        return 0
    if not re.fullmatch(r"[+-]?[0-9]{1,3}", text) or abs(int(text)) > MAX_PRIORITY:
        raise _wrong("x-baton-priority", f"a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return int(text)


def _tenant(text: str | None) -> str:
    if text is None:
        return ""
    if not _TENANT.fullmatch(text):
        raise _wrong("x-baton-tenant", "1 to 128 printable characters without spaces")
    return text


def _switch(text: str | None, name: str) -> bool:
    if text not in (None, "0", "1"):
        raise _wrong(name, "0 or 1")
    return text == "1"


def _wrong(name: str, accepts: str) -> ApiError:
    return invalid(name, f"{name} must be {accepts}.", "invalid_value")
