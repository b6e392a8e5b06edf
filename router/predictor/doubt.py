"""How far a worker's speed is doubted of which nothing was heard for long.

Who looks slow is not chosen, so nothing would ever correct it: steps that were measured while its
machine was busy, or one bad hour, would stand for ever. So the older what is known of a worker,
the more it is thought to be like its peers, until a request goes there and tells. That is optimism
under uncertainty, with old evidence discounted (Garivier and Moulines, "On upper-confidence bound
policies for switching bandit problems", ALT 2011). Trials are bounded: the first request sent
there ends the doubt. Age is counted in rounds, as many reports as there are workers; no clock.
"""

from collections.abc import Container

PATIENCE = 32
"""After so many rounds of silence doubt begins; after twice as many it is whole."""


class Doubts:
    """Of the workers of one role. `of` has those that are doubted: 0, where one is not there, takes
    it at its word; 1 takes it for one like its peers."""

    def __init__(self) -> None:
        self.of: dict[str, float] = {}
        self._silent_rounds: dict[str, int] = {}
        self._reports = 0
        """Of the round that is going on."""

    def tried(self, worker_id: str) -> None:
        """A request goes there, and what it teaches is on its way; or the worker is new."""
        self._silent_rounds[worker_id] = 0
        self.of.pop(worker_id, None)

    def heard(self, worker_id: str) -> None:
        """A worker has reported."""
        self.tried(worker_id)
        self._reports += 1
        if self._reports >= len(self._silent_rounds):
            self._end_round()

    def keep_only(self, worker_ids: Container[str]) -> None:
        for name in [name for name in self._silent_rounds if name not in worker_ids]:
            self.tried(name)
            del self._silent_rounds[name]

    def _end_round(self) -> None:
        self._reports = 0
        for name, rounds in self._silent_rounds.items():
            self._silent_rounds[name] = rounds + 1
            if rounds >= PATIENCE:
                self.of[name] = min((rounds + 1) / PATIENCE - 1.0, 1.0)
