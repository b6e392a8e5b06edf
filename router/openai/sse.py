"""Server-sent events, cheap to make: whatever is the same in every chunk is serialised once.

Knows the frame around a choice and the closing chunk; the choice's inside comes from the
endpoint's format as ready bytes.
"""

from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"


class ChunkWriter:
    def __init__(self, head: dict[str, Any], include_usage: bool) -> None:
        opened = orjson.dumps(head)[:-1]
        self._open = b"data: " + opened + b',"choices":[{"index":'
        self._close = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._closing = b"data: " + opened + b',"choices":[],'

    def count(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """The chunks from here on say so in their usage."""
        self._close = (
            b'}],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n'
            % (num_prompt_tokens, num_output_tokens, num_prompt_tokens + num_output_tokens)
        )

    def choice(self, index: int, inside: bytes) -> bytes:
        return b"%b%d,%b%b" % (self._open, index, inside, self._close)

    def closing(self, fields: dict[str, Any]) -> bytes:
        """A chunk without choices."""
        return self._closing + orjson.dumps(fields)[1:] + b"\n\n"


def error_event(body: bytes) -> bytes:
    """An in-band error; `body` is the JSON of an error answer."""
    return b"data: " + body + b"\n\n"
