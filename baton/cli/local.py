"""Where a router answers that was started without options, and the key that is shown to it."""

import os

from baton.cluster.errors import SettingsError

LOCAL = "http://127.0.0.1:8000"
KEY_VARIABLE = "BATON_API_KEY"


def key_headers() -> dict[str, str]:
    """Of the environment's API key; empty without one."""
    key = os.environ.get(KEY_VARIABLE)
    if key and not (key.isascii() and key.isprintable()):
        raise SettingsError(f"{KEY_VARIABLE} is no API key: they are of printable ASCII.")
    return {"authorization": f"Bearer {key}"} if key else {}
