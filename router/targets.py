"""What a request wants: latency targets, what happens when they cannot be met, and its rank.

Pure: a request's own words go over its tenant's defaults, those over the model's, those over
the server's. Infinity means that nothing was asked for.
"""

import math
from dataclasses import dataclass

from baton.cluster.errors import Overloaded
from baton.cluster.settings import RouterSettings
from baton.cluster.values import TargetValues, parse_targets


@dataclass(frozen=True)
class Targets:
    """Seconds from the request to its first token, and per further token. `reject`: refuse the
    request rather than serve it too late. A higher priority is served first."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    reject: bool = False
    priority: int = 0


class DefaultTargets:
    """The defaults of one router."""

    def __init__(self, settings: RouterSettings) -> None:
        self._server = TargetValues(settings.ttft_ms, settings.tpot_ms, settings.slo_policy)
        self._models = parse_targets(settings.model_targets)
        self._tenants = parse_targets(settings.tenant_targets)

    def targets(self, own: TargetValues, priority: int, model: str, tenant: str) -> Targets:
        nothing = TargetValues()
        levels = (
            own,
            self._tenants.get(tenant, nothing),
            self._models.get(model, nothing),
            self._server,
        )
        ttft_ms = next((v.ttft_ms for v in levels if v.ttft_ms is not None), math.inf)
        tpot_ms = next((v.tpot_ms for v in levels if v.tpot_ms is not None), math.inf)
        policy = next((v.policy for v in levels if v.policy is not None), None)
        return Targets(ttft_ms / 1e3, tpot_ms / 1e3, policy == "reject", priority)


class Unattainable(Overloaded):
    """A request that would rather be refused than late, and is predicted to be late."""

    def __init__(self, targets: Targets, ttft_s: float, tpot_s: float) -> None:
        late_s = max(ttft_s - targets.ttft_s, 0.0)
        super().__init__(
            f"The latency targets cannot be met now: {ttft_s * 1e3:.0f} ms to the first token and "
            f"{tpot_s * 1e3:.1f} ms per further token are predicted.",
            retry_after_s=max(1.0, math.ceil(late_s)),
        )
        self.targets = targets
        self.ttft_s = ttft_s
        self.tpot_s = tpot_s
