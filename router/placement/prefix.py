"""Where most of the prompt is cached; among equals the least loaded."""

from router.placement.cost import Plan
from router.placement.facts import Candidate
from router.placement.options import Options


class Prefix:
    def choose(self, options: Options) -> Plan:
        if not options.request.needs_decode and options.prefills:
            return options.prefill_only(min(options.prefills, key=_affinity))
        decode = min(options.decodes, key=_affinity)
        prefills = options.matching(decode)
        return options.plan(min(prefills, key=_affinity) if prefills else None, decode)


def _affinity(candidate: Candidate) -> tuple[int, float, str]:
    return -candidate.cached_tokens, *candidate.crowding
