"""One caller: its tenant, the cached prefixes it shares, what it has left of its limits.

Without keys in force everybody is `ANYBODY`, who may do everything and names a tenant at will.
"""

import math
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Scope

from router.access.keys import ApiKey
from router.access.limits import Limit, SharedLimits
from router.openai.errors import ApiError

SCOPE = "baton.caller"


class Allowance:
    """What one key has left. Lives as long as the key has these limits."""

    def __init__(self, key: ApiKey, shared: SharedLimits | None = None) -> None:
        def limit(unit: str, per_minute: int | None) -> Limit | None:
            return Limit(f"{unit}:{key.sha256}", per_minute, shared) if per_minute else None

        self._requests = limit("requests", key.requests_per_minute)
        self._tokens = limit("tokens", key.tokens_per_minute)

    async def request(self, now: float) -> None:
        """Counts one request. Raises ApiError when there have been too many."""
        await _take(self._requests, 1, now, "requests")

    async def tokens(self, count: int, now: float) -> None:
        """Pays for a prompt before it is computed. Raises ApiError."""
        await _take(self._tokens, count, now, "tokens")

    def spent(self, count: int, now: float) -> None:
        """Pays for tokens that have been generated; takes some back when the count is below 0."""
        if self._tokens is not None:
            self._tokens.pay(count, now)


async def _take(limit: Limit | None, cost: int, now: float, unit: str) -> None:
    wait_s = 0.0 if limit is None else await limit.take(cost, now)
    if limit is not None and wait_s > 0:
        raise ApiError(
            f"This API key may use {limit.per_minute} {unit} per minute; "
            f"try again in {math.ceil(wait_s)} s.",
            429,
            "rate_limit_error",
            code="rate_limit_exceeded",
            retry_after_s=wait_s,
        )


@dataclass(frozen=True)
class Caller:
    key: ApiKey | None = None
    allowance: Allowance | None = field(default=None, repr=False)

    async def count_request(self, now: float) -> None:
        """Raises ApiError when there have been too many; so does `count_prompt`."""
        if self.allowance is not None:
            await self.allowance.request(now)

    async def count_prompt(self, num_tokens: int, now: float) -> None:
        if self.allowance is not None:
            await self.allowance.tokens(num_tokens, now)

    def count_output(self, num_tokens: int, now: float) -> None:
        if self.allowance is not None:
            self.allowance.spent(num_tokens, now)

    def return_prompt(self, num_tokens: int, now: float) -> None:
        """Of a prompt that was counted but that no worker began with."""
        self.count_output(-num_tokens, now)

    @property
    def admin(self) -> bool:
        return self.key is None or self.key.admin

    def sees(self, tenant: str) -> bool:
        return self.admin or (self.key is not None and self.key.tenant == tenant)

    def tenant(self, named: str) -> str:
        """`named`: what the request says, or empty. Raises ApiError when that is not its own."""
        if self.key is None:
            return named
        if named and not self.sees(named):
            raise ApiError(
                "This API key does not belong to the tenant that x-baton-tenant names.",
                403,
                "permission_error",
                param="x-baton-tenant",
                code="permission_denied",
            )
        return named or self.key.tenant

    def cache_salt(self, tenant: str, own: str) -> str:
        """Equal only where cached prefixes may be shared. `own` is the request's."""
        if self.key is None:
            return own
        group = self.key.cache_group
        scope = f"tenant {tenant}" if group is None else f"group {group}"
        return f"{len(scope)}:{scope}{own}"


ANYBODY = Caller()


def caller_of(scope: Scope) -> Caller:
    """Whom the gate has let in."""
    caller: Caller = scope[SCOPE]
    return caller


def request_caller(request: Request) -> Caller:
    return caller_of(request.scope)


def admin_only(request: Request) -> None:
    """A dependency of endpoints that show more than one tenant's business. Raises ApiError."""
    if not caller_of(request.scope).admin:
        raise ApiError(
            "Only an admin's API key may use this.",
            403,
            "permission_error",
            code="permission_denied",
        )
