"""The block hashes of one prompt, as the workers that would serve it compute them.

Hashes depend on a worker's model and block size, so they are computed when first asked for and
kept: all workers of a cluster usually share one chain.
"""

import hashlib
from array import array
from collections.abc import Sequence

from baton.block_hash import block_hashes, policy_name, root_hash
from baton.cluster.workers import KVLayout
from baton.kv_policy import FULL, KVPolicy

AFFINITY_TOKENS = 64


class PromptBlocks:
    """`cache_salt` separates the caches of tenants, `kv_policy` those of policies, as in the
    requests to the workers. `cache_key` says which prompts belong together where their tokens do
    not."""

    def __init__(
        self,
        token_ids: Sequence[int],
        cache_salt: str = "",
        cache_key: str = "",
        kv_policy: KVPolicy = FULL,
    ) -> None:
        self._token_ids = token_ids
        self._cache_salt = cache_salt
        self.cache_key = cache_key
        self._kv_policy = kv_policy
        self._chains: dict[tuple[str, str, int], list[bytes]] = {}

    def hashes(self, layout: KVLayout) -> list[bytes]:
        """Of all full blocks, in order."""
        key = (layout.fingerprint, layout.dtype, layout.block_size)
        if key not in self._chains:
            name = policy_name(layout.dtype, str(self._kv_policy))
            root = root_hash(layout.fingerprint, name, self._cache_salt)
            self._chains[key] = block_hashes(root, self._token_ids, layout.block_size)
        return self._chains[key]

    def reusable_hashes(self, layout: KVLayout) -> list[bytes]:
        """Of the blocks that a cache can save: the last token is always computed again."""
        count = len(self._token_ids)
        reusable = max(self._kv_policy.reusable(count, count), 0)
        return self.hashes(layout)[: reusable // layout.block_size]

    @property
    def affinity(self) -> bytes:
        """Equal for prompts of one tenant that have the same key or, without one, begin alike:
        where to send them unless something better is known."""
        digest = hashlib.blake2b(
            self._cache_salt.encode(), digest_size=16, person=b"baton-affinity"
        )
        alike = array("I", self._token_ids[:AFFINITY_TOKENS]).tobytes()
        digest.update(b"key" + self.cache_key.encode() if self.cache_key else alike)
        return digest.digest()
