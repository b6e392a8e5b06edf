"""The rendezvous of a torch.distributed group of two: a key-value store that listens nowhere.

torch's own TCPStore is open to whoever reaches its port. Here each end keeps a dictionary, and
what one end sets is told to the other over a channel that both already trust.
"""

import threading
from collections.abc import Callable

import torch.distributed as dist

MAX_KEYS = 64
"""Gloo needs one per rank, NCCL one more."""
MAX_VALUE_BYTES = 64 << 10


class PairStore(dist.Store):
    """`tell` carries a key and its value to the other end, which calls `put`; from any thread.
    `get` and `wait` block, at most `timeout_s`."""

    def __init__(self, tell: Callable[[str, bytes], None], timeout_s: float) -> None:
        super().__init__()
        self._tell = tell
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        """Raises ValueError for more than any rendezvous needs."""
        with self._changed:
            if len(value) > MAX_VALUE_BYTES or len(self._values) >= MAX_KEYS:
                raise ValueError("the other end tells more than a rendezvous needs")
            self._values[key] = value
            self._changed.notify_all()

    # --- called by torch --------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, content)
        self._tell(key, content)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: object = None) -> None:
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._values.keys() >= set(keys), self._timeout_s
            ):
                raise RuntimeError(f"the other end did not tell {keys} within {self._timeout_s} s")
