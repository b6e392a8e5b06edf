"""Who calls, and what they may do.

bucket    requests and tokens per minute, by the clock that it is given
limits    the buckets of all routers together, in Redis
keys      API keys as they are kept: hashes, tenants, limits
ring      the keys in force, read again when their file changes
caller    one caller: its tenant, the caches it shares, what it has left
gate      in front of the application: no key, no answer
"""

from router.access.caller import Caller, caller_of
from router.access.gate import Gate
from router.access.limits import SharedLimits
from router.access.ring import KeyRing

__all__ = ["Caller", "Gate", "KeyRing", "SharedLimits", "caller_of"]
