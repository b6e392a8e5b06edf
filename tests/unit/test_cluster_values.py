"""Sizes, core lists, worker records, backoff."""

import dataclasses
from collections.abc import Callable

import pytest

from baton.cluster.registry.backoff import Backoff
from baton.cluster.values import (
    format_cores,
    format_size,
    parse_cores,
    parse_size,
    parse_targets,
)
from baton.cluster.workers import WorkerRecord, new_incarnation
from tests.support.redis import make_record


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512MiB", 512 << 20),
        ("2G", 2 << 30),
        ("2gib", 2 << 30),
        ("1.5GB", 1_500_000_000),
        ("4096", 4096),
        (4096, 4096),
        (" 1 KiB ", 1024),
    ],
)
def test_sizes_are_read_in_binary_and_decimal_units(text: str | int, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "lots", "12XB", "-1MiB", "MiB", "1e9", "1 2"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a size such as"):
        parse_size(text)


def test_sizes_are_written_in_the_largest_fitting_unit() -> None:
    assert [format_size(n) for n in (0, 1023, 1536, 512 << 20, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "512.0 MiB",
        "5.0 TiB",
    ]


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0", (0,)), ("0-1,3", (0, 1, 3)), ("3,1, 1-2", (1, 2, 3)), ((2, 0), (0, 2)), (None, None)],
)
def test_core_lists_are_sorted_and_unique(
    text: str | tuple[int, ...] | None, cores: tuple[int, ...] | None
) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-1", "0-1-2", "0-999999999"])
def test_other_core_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a list of cores"):
        parse_cores(text)


def test_core_lists_survive_a_round_trip() -> None:
    assert parse_cores(format_cores((0, 1, 5))) == (0, 1, 5)


def test_a_record_survives_json() -> None:
    record = make_record("prefill-0", running=3, draining=True)
    record = dataclasses.replace(record, cores=(0, 3))
    assert WorkerRecord.from_json(record.to_json()) == record


def test_a_record_of_a_newer_version_with_more_fields_is_still_read() -> None:
    record = make_record()
    text = record.to_json().replace(b'"load":{', b'"novelty":1,"load":{"novelty":2,')
    assert WorkerRecord.from_json(text) == record


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b"null", b"7", b'{"role":"cook","layout":{},"load":{}}']
)
def test_anything_else_is_not_a_record(text: bytes) -> None:
    with pytest.raises(ValueError):
        WorkerRecord.from_json(text)


def test_incarnations_are_unique_and_sort_by_birth() -> None:
    lives = [new_incarnation() for _ in range(50)]
    assert len(set(lives)) == 50
    assert [life[:16] for life in lives] == sorted(life[:16] for life in lives)


def test_backoff_grows_with_jitter_up_to_its_limit_and_starts_small_after_a_success() -> None:
    backoff = Backoff(first_s=0.1, limit_s=1.0)
    waits = [backoff.next_s() for _ in range(40)]
    for wait, whole in zip(waits, [0.1, 0.2, 0.4, 0.8, *[1.0] * 36], strict=True):
        assert whole / 2 <= wait <= whole
    assert len(set(waits[4:])) > 1
    backoff.reset()
    assert backoff.failures == 0
    assert backoff.next_s() <= 0.1


@pytest.mark.parametrize("parse", [parse_size, parse_cores, parse_targets])
def test_digits_are_those_of_ascii(parse: Callable[[str], object]) -> None:
    with pytest.raises(ValueError, match=r"a (size|list)"):
        parse("٣" if parse is not parse_targets else "gold=٣/-")
