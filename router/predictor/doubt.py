"""How far a worker's speed is doubted of which nothing was heard for long.

Who looks slow is not chosen, so nothing would ever correct it: steps that were measured while its
machine was busy, or one bad hour, would stand for ever. So the older what is known of a worker,
the more it is thought to be like its peers, until a request goes there and tells. That is optimism
under uncertainty, with old evidence discounted (Garivier and Moulines, "On upper-confidence bound
policies for switching bandit problems", ALT 2011). Trials are bounded: the first request sent
there ends the doubt. Age is counted in reports of the peers; no clock.
"""

from collections.abc import Container

PATIENCE = 32
"""After so many reports of each peer doubt begins; after twice as many it is whole."""


class Doubts:
    """Of the workers of one role."""

    def __init__(self) -> None:
        self._reports = 0
        self._heard: dict[str, int] = {}
        """How many reports there were when a worker last reported or was tried."""

    def heard(self, worker_id: str) -> None:
        self._reports += 1
        self._heard[worker_id] = self._reports

    def tried(self, worker_id: str) -> None:
        """A request goes there; what it teaches is on its way."""
        self._heard[worker_id] = self._reports

    def doubt(self, worker_id: str) -> float:
        """0: it is taken at its word; 1: for one like its peers."""
        silent = self._reports - self._heard.setdefault(worker_id, self._reports)
        patience = PATIENCE * len(self._heard)
        return 0.0 if silent <= patience else min(silent / patience - 1.0, 1.0)

    def keep_only(self, worker_ids: Container[str]) -> None:
        self._heard = {name: at for name, at in self._heard.items() if name in worker_ids}
