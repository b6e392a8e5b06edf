"""The less loaded of two drawn at random, for each role.

Source: Mitzenmacher, "The power of two choices in randomized load balancing", 2001.
"""

import random
from collections.abc import Sequence

from router.placement.cost import Plan
from router.placement.facts import Candidate
from router.placement.options import Options


class PowerOfTwo:
    def choose(self, options: Options) -> Plan:
        draw = random.Random(options.request.number)
        if not options.request.needs_decode and options.prefills:
            return options.prefill_only(_lighter(draw, options.prefills))
        decode = _lighter(draw, options.decodes)
        prefills = options.matching(decode)
        return options.plan(_lighter(draw, prefills) if prefills else None, decode)


def _lighter(draw: random.Random, candidates: Sequence[Candidate]) -> Candidate:
    two = draw.sample(candidates, min(2, len(candidates)))
    return min(two, key=lambda candidate: candidate.crowding)
