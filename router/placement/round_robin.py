"""One after the other, whatever their load."""

from router.placement.cost import Plan
from router.placement.options import Options


class RoundRobin:
    def choose(self, options: Options) -> Plan:
        number = options.request.number
        if not options.request.needs_decode and options.prefills:
            return options.prefill_only(options.prefills[number % len(options.prefills)])
        decode = options.decodes[number % len(options.decodes)]
        prefills = options.matching(decode)
        return options.plan(prefills[number % len(prefills)] if prefills else None, decode)
