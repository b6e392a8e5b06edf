"""What has been said already: for warnings whose cause repeats itself at every try."""

from collections import OrderedDict
from collections.abc import Hashable

AGAIN_S = 3600.0


class Once:
    """Remembers at most `limit` things, each for `again_s`."""

    def __init__(self, again_s: float = AGAIN_S, limit: int = 256) -> None:
        self._again_s = again_s
        self._limit = limit
        self._said: OrderedDict[Hashable, float] = OrderedDict()

    def first(self, what: Hashable, now: float) -> bool:
        """True when it has not been asked for within the time."""
        said = self._said.get(what)
        if said is not None and now < said + self._again_s:
            return False
        self._said[what] = now
        self._said.move_to_end(what)
        if len(self._said) > self._limit:
            self._said.popitem(last=False)
        return True
