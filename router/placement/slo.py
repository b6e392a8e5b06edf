"""The joint choice: the cheapest placement that keeps every promise, else the least broken one.

Prefill and decode workers are ranked by themselves first, and only the best of both as pairs:
nothing but the transfer depends on the two of them at once. Rather than break a promise to those
who decode already, a request waits until one of them has ended, unless its priority is raised.
"""

from heapq import nsmallest

from baton.cluster.workers import Role
from router.placement.cost import Plan
from router.placement.options import NoRoom, Options

FINALISTS = 3


class Slo:
    def choose(self, options: Options) -> Plan:
        best, *others = nsmallest(2, self.plans(options), key=lambda plan: plan.rank)
        if best.others_miss and options.request.targets.priority <= 0:
            raise NoRoom(Role.DECODE)
        return best._replace(other=others[0]) if others else best

    def plans(self, options: Options) -> list[Plan]:
        best = nsmallest(FINALISTS, options.prefills, key=options.prefill_rank)
        decodes = nsmallest(FINALISTS, options.decodes, key=options.decode_rank)
        # A cached prompt may be worth more than an idle worker.
        decodes += [d for d in options.decodes if d.cached_tokens and d not in decodes][:2]
        plans = []
        for decode in decodes:
            matching = [p for p in best if options.match(p, decode)]
            if not matching:
                matching = nsmallest(1, options.matching(decode), key=options.prefill_rank)
            plans += [options.pair(prefill, decode) for prefill in matching]
            if options.may_prefill(decode):
                plans.append(options.decode_alone(decode))
        if not options.request.needs_decode:
            plans += [options.prefill_only(prefill) for prefill in best]
        return plans
