"""Where a router answers that was started without options, and the key that is shown to it."""

import os

LOCAL = "http://127.0.0.1:8000"
KEY_VARIABLE = "BATON_API_KEY"


def key_headers() -> dict[str, str]:
    """Of the environment's API key; empty without one."""
    key = os.environ.get(KEY_VARIABLE)
    return {"authorization": f"Bearer {key}"} if key else {}
