"""The last requests, found by their own id or by their answer's; bounded in number and in size."""

from collections import OrderedDict
from collections.abc import Iterator

from baton.cluster.ledger.ledger import Ledger

MAX_BYTES = 20_000_000


class Recent:
    """Keeps `capacity` ledgers, fewer when they are long; the oldest goes first."""

    def __init__(self, capacity: int, max_bytes: int = MAX_BYTES) -> None:
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[int, tuple[Ledger, int]] = OrderedDict()
        self._by_id: dict[tuple[str | None, str], int] = {}
        """Of one tenant; under None the newest of all tenants."""
        self._next = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Ledger]:
        """Newest first."""
        return (ledger for ledger, _ in reversed(self._kept.values()))

    def add(self, ledger: Ledger) -> None:
        number, self._next = self._next, self._next + 1
        size = ledger.num_bytes
        self._kept[number] = ledger, size
        self._bytes += size
        for name in _names(ledger):
            self._by_id[name] = number
        while len(self._kept) > 1 and (
            len(self._kept) > self._capacity or self._bytes > self._max_bytes
        ):
            self._drop_oldest()

    def find(self, name: str, tenant: str | None = None) -> Ledger | None:
        """By request id or answer id, of one tenant or of all: clients choose request ids, so two
        tenants may use the same. The newest when an id was used twice."""
        number = self._by_id.get((tenant, name))
        return None if number is None else self._kept[number][0]

    def _drop_oldest(self) -> None:
        number, (ledger, size) = self._kept.popitem(last=False)
        self._bytes -= size
        for name in _names(ledger):
            if self._by_id.get(name) == number:
                del self._by_id[name]


def _names(ledger: Ledger) -> list[tuple[str | None, str]]:
    ids = [name for name in (ledger.request_id, ledger.answer_id) if name]
    return [(tenant, name) for tenant in (ledger.tenant, None) for name in ids]
