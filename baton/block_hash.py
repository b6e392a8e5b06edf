"""Names of KV blocks: a chain of strong hashes over token ids.

The hash of a full block covers every token before it, seeded with the model's
fingerprint, the KV policy and the tenant's salt, so equal hashes mean equal KV. It is the
same in every process and on every machine (BLAKE2b, RFC 7693), never Python's `hash`.
Partly filled blocks have no hash: they belong to one sequence.
"""

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence

DIGEST_SIZE = 16


def root_hash(fingerprint: str, kv_policy: str = "full", cache_salt: str = "") -> bytes:
    """Parent of every first block; the policy is that of `policy_name`. Fields are
    length-prefixed, so they cannot run together."""
    digest = hashlib.blake2b(digest_size=DIGEST_SIZE, person=b"baton-kv")
    for field in (fingerprint, kv_policy, cache_salt):
        raw = field.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


def policy_name(dtype: str, kv_policy: str = "full") -> str:
    """How KV is stored (the `dtype` of a layout) and what is kept of it, in one name."""
    return dtype if kv_policy == "full" else f"{dtype} {kv_policy}"


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of one full block that follows `parent`."""
    raw = array("I", token_ids).tobytes()
    return hashlib.blake2b(parent + raw, digest_size=DIGEST_SIZE).digest()


def block_hashes(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Hashes of all full blocks of `token_ids`, in order."""
    tokens = array("I", token_ids)
    raw, stride = tokens.tobytes(), block_size * tokens.itemsize
    hashes, parent = [], root
    for end in range(stride, len(raw) + 1, stride):
        parent = hashlib.blake2b(parent + raw[end - stride : end], digest_size=DIGEST_SIZE).digest()
        hashes.append(parent)
    return hashes


def common_blocks(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many leading blocks two chains share: after the first difference all differ."""
    shorter = range(min(len(one), len(other)))
    return bisect_left(shorter, True, key=lambda place: one[place] != other[place])
