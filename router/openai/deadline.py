"""How long a request may live: its own `x-request-timeout-ms` within the server's limits.

Knows the header and the settings; no clock.
"""

from baton.cluster.settings import RouterSettings
from router.openai.errors import ApiError, invalid

HEADER = "x-request-timeout-ms"
# Nine digits of milliseconds are beyond any limit of the server.
_DIGITS = 9


def time_allowed(header: str | None, settings: RouterSettings) -> float:
    """Seconds. A client may ask for less than the server's longest, not for more. Raises ApiError
    when the header is not a whole number of milliseconds of at least 1."""
    if header is None:
        asked = settings.default_request_timeout_s or settings.request_timeout_s
    elif header.isascii() and header.isdigit() and int(header[:_DIGITS]) > 0:
        asked = int(header[:_DIGITS]) / 1000
    else:
        raise _malformed(header)
    return min(asked, settings.request_timeout_s)


def _malformed(header: str) -> ApiError:
    return invalid(
        HEADER,
        f"{HEADER} must be a whole number of milliseconds of at least 1, not {header[:40]!r}.",
        "invalid_value",
    )
