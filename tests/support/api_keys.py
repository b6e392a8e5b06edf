"""A file of API keys for tests, and the headers that show them."""

from pathlib import Path
from typing import Any

from router.access.keys import ApiKey, hash_of, new_key


class Keys:
    """`headers[name]` shows the key of that name."""

    def __init__(self, path: Path, **entries: dict[str, Any]) -> None:
        self.path = path
        self.secrets = {name: new_key() for name in entries}
        self.headers = {
            name: {"authorization": f"Bearer {key}"} for name, key in self.secrets.items()
        }
        lines = [
            ApiKey(**{"name": name, "sha256": hash_of(key), "tenant": name, **entries[name]}).line()
            for name, key in self.secrets.items()
        ]
        path.write_text("\n".join(lines))
