"""The least loaded decode worker, then the least loaded prefill worker that matches it."""

from router.placement.cost import Plan
from router.placement.facts import Candidate
from router.placement.options import Options


class LeastLoaded:
    def choose(self, options: Options) -> Plan:
        if not options.request.needs_decode and options.prefills:
            return options.prefill_only(min(options.prefills, key=_crowding))
        decode = min(options.decodes, key=_crowding)
        prefills = options.matching(decode)
        return options.plan(min(prefills, key=_crowding) if prefills else None, decode)


def _crowding(candidate: Candidate) -> tuple[float, str]:
    return candidate.crowding
