"""The ledger: where every millisecond of a request went, across router, prefill and decode.

    Trail     what the router and the workers noted while the request ran (cheap, raw)
    timeline  trail → spans on the router's clock, each worker's clock aligned
    tile      spans → phases that sum exactly to the request's wall clock
    Ledger    one finished request: its trails, its figures, its `timing`

Plain Python: no I/O and no clock; times are passed in.
"""

from baton.cluster.ledger.ledger import Ledger
from baton.cluster.ledger.recent import Recent
from baton.cluster.ledger.trail import CallTrail, Trail

__all__ = ["CallTrail", "Ledger", "Recent", "Trail"]
