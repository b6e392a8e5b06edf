"""Which workers serve a request: a pure choice from facts, candidates and predictions.

No I/O, no clock, no state. Policies choose among `Options` and are known by name.
"""

from collections.abc import Iterable
from typing import Protocol

from router.placement.cost import Cost, Plan
from router.placement.facts import Candidate, RequestFacts
from router.placement.least_loaded import LeastLoaded
from router.placement.options import NoRoom, NoWorker, Options, Rules
from router.placement.power_of_two import PowerOfTwo
from router.placement.prefix import Prefix
from router.placement.round_robin import RoundRobin
from router.placement.slo import Slo
from router.predictor import Predictor

__all__ = [
    "POLICIES",
    "Candidate",
    "Cost",
    "NoRoom",
    "NoWorker",
    "Options",
    "Placement",
    "Plan",
    "RequestFacts",
    "Rules",
    "place",
]


class Placement(Protocol):
    """A policy. There is at least one way among the options."""

    def choose(self, options: Options) -> Plan: ...


POLICIES: dict[str, type[Placement]] = {
    "slo": Slo,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
    "prefix": Prefix,
    "power_of_two": PowerOfTwo,
}


def place(
    policy: Placement,
    request: RequestFacts,
    candidates: Iterable[Candidate],
    predictor: Predictor,
    rules: Rules,
) -> Plan:
    """Raises NoWorker, or NoRoom when the request has to wait."""
    options = Options(request, candidates, predictor, rules)
    return options.check(policy.choose(options))
