"""Rows between caches and payloads, by the kernel or by numpy: the same bytes, the same XXH3-64."""

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.ops.cpu.kernels import kernels
from baton.engine.transfer import rows
from baton.engine.transfer.rows import copy_rows

needs_kernels = pytest.mark.skipif(kernels() is None, reason="no kernels for this CPU")


def random_planes(planes: int, count: int, row_bytes: int, offset: int = 0) -> np.ndarray:
    """At any address, as a payload in a message is."""
    size = planes * count * row_bytes
    memory = np.random.default_rng(size).integers(0, 256, size + offset, dtype=np.uint8)
    return memory[offset:].reshape(planes, count, row_bytes)


tables = st.permutations(range(9)).flatmap(lambda ids: st.integers(1, 9).map(lambda n: ids[:n]))


@pytest.mark.parametrize("way", ["numpy", pytest.param("kernel", marks=needs_kernels)])
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), tables, st.sampled_from([48, 64, 192, 1088, 4096]), st.integers(0, 9))
def test_rows_pass_through_a_payload_bit_for_bit_with_the_hash_of_it(
    way: str, planes: int, table: list[int], row_bytes: int, offset: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        if way == "numpy":
            patched.setattr(rows, "kernels", lambda: None)
        source, target = random_planes(planes, 9, row_bytes), np.zeros((planes, 9, row_bytes), "u1")
        payload = random_planes(planes, len(table), row_bytes, offset)
        digest = copy_rows(source, table, payload, None, True)
        assert (payload == source[:, table]).all()
        assert digest == xxhash.xxh3_64_intdigest(payload.tobytes())
        assert copy_rows(payload, None, target, table[::-1], True) == digest
        assert (target[:, table[::-1]] == payload).all()
        untouched = [row for row in range(9) if row not in table]
        assert not target[:, untouched].any()
        assert copy_rows(source, table, target, table, False) is None
        assert (target[:, table] == source[:, table]).all()


@pytest.mark.parametrize("table", [[0, 9], [-1, 2]])
def test_rows_outside_the_cache_are_refused(table: list[int]) -> None:
    source, payload = random_planes(2, 9, 64), random_planes(2, 2, 64)
    with pytest.raises(ValueError, match="rows must be in"):
        copy_rows(source, table, payload, None, True)
    with pytest.raises(ValueError, match="rows must be in"):
        copy_rows(payload, None, source, table, True)


def test_more_rows_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows do not fit into 2"):
        copy_rows(random_planes(1, 9, 64), [0, 1, 2], random_planes(1, 2, 64), None, True)
