"""API keys and limits: the bucket, the lines of a file, a file that changes."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from baton.cli.keys import app
from baton.cli.main import main
from baton.cluster.errors import BatonError, SettingsError
from router.access.bucket import Bucket
from router.access.caller import ANYBODY, Caller
from router.access.keys import ApiKey, hash_of, new_key, parse_keys
from router.access.ring import KeyRing
from router.openai.errors import ApiError


def entry(name: str, key: str, **fields: object) -> str:
    return ApiKey(name=name, sha256=hash_of(key), tenant=name, **fields).line() + "\n"  # type: ignore[arg-type]


def test_a_bucket_gives_a_minutes_worth_at_once_and_then_fills_evenly() -> None:
    bucket = Bucket(60)
    for _ in range(60):
        assert bucket.wait_s(1, 100.0) == 0
        bucket.pay(1, 100.0)
    assert bucket.wait_s(1, 100.0) == pytest.approx(1.0)
    assert bucket.wait_s(1, 100.6) == pytest.approx(0.4)
    assert bucket.wait_s(1, 101.0) == 0


def test_what_was_overdrawn_keeps_the_next_ones_waiting() -> None:
    bucket = Bucket(600)
    bucket.pay(900, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(30.1)
    assert bucket.wait_s(1, 31.0) == 0


def test_a_prompt_larger_than_a_minutes_worth_waits_for_a_full_bucket_only() -> None:
    bucket = Bucket(100)
    assert bucket.wait_s(5000, 0.0) == 0
    bucket.pay(5000, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx((4900 + 1) * 0.6)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), max_size=60))
def test_no_more_passes_a_bucket_than_its_burst_and_its_rate(
    steps: list[tuple[float, int]],
) -> None:
    bucket, now, passed = Bucket(60), 0.0, 0
    for pause, cost in steps:
        now += pause
        if bucket.wait_s(cost, now) == 0:
            bucket.pay(cost, now)
            passed += cost
        assert passed <= 60 + now + 1e-6


def test_a_line_reads_as_it_was_written() -> None:
    key = ApiKey(
        name="a-1", sha256="0" * 64, tenant='q"\\x', cache_group="g", requests_per_minute=3,
        tokens_per_minute=5, admin=True,
    )  # fmt: skip
    assert parse_keys(key.line()) == (key,)
    assert "0000" not in repr(key)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("alice = 5", "'alice' must be a table"),
        ("alice = {}", "'alice': sha256"),
        ('alice = { sha256 = "abc" }', "'alice': sha256"),
        (f'alice = {{ sha256 = "{"a" * 64}", requests_per_minute = 0 }}', "requests_per_minute"),
        (f'alice = {{ sha256 = "{"a" * 64}", rpm = 1 }}', "'alice': rpm"),
        (f'"al ice" = {{ sha256 = "{"a" * 64}" }}', "name"),
        (f'a = {{ sha256 = "{"a" * 64}" }}\nb = {{ sha256 = "{"a" * 64}" }}', "same hash"),
        ("alice = {", "not valid TOML"),
    ],
)
def test_a_wrong_line_is_a_sentence_that_names_it(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as wrong:
        parse_keys(text)
    assert "aaaa" not in str(wrong.value)
    with pytest.raises(SettingsError, match="API keys cannot be read"):
        KeyRing(text)


def test_new_keys_are_long_and_never_alike() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100 and min(map(len, keys)) >= 43 + len("sk-baton-")


def test_without_keys_everybody_is_let_in_and_with_an_empty_file_nobody(tmp_path: Path) -> None:
    assert KeyRing().caller(None) is ANYBODY
    empty = tmp_path / "keys"
    empty.touch()
    with pytest.raises(ApiError) as refused:
        KeyRing(path=empty).caller("Bearer sk-x")
    assert refused.value.status == 401


def test_a_file_that_changes_counts_at_once_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, alice, bob = tmp_path / "keys", new_key(), new_key()
    path.write_text(entry("alice", alice))
    ring = KeyRing(path=path)
    before = ring.caller(f"Bearer {alice}")
    with pytest.raises(ApiError):
        ring.caller(f"Bearer {bob}")
    path.write_text(entry("alice", alice) + entry("bob", bob))
    assert ring.caller(f"bearer {bob}").key is not None
    assert ring.caller(f"Bearer {alice}") is before  # with what it has left
    path.write_text("bob = {")
    for _ in range(3):
        assert ring.caller(f"Bearer {bob}").key is not None
    assert sum("stay in force" in record.getMessage() for record in caplog.records) == 1
    path.write_text(entry("alice", alice))
    with pytest.raises(ApiError):
        ring.caller(f"Bearer {bob}")
    assert bob not in caplog.text and alice not in caplog.text


def test_tenants_share_no_salt_whatever_salts_they_send() -> None:
    def caller(tenant: str, group: str | None = None) -> Caller:
        return Caller(ApiKey(name="k", sha256="0" * 64, tenant=tenant, cache_group=group))

    a, b = caller("a"), caller("b")
    assert a.cache_salt("a", "x") != b.cache_salt("b", "x")
    assert a.cache_salt("a", "x") != a.cache_salt("a", "y")
    assert caller("a").cache_salt("a", "1") != caller("a1").cache_salt("a1", "")
    assert caller("a", "g").cache_salt("a", "") == caller("b", "g").cache_salt("b", "")
    assert caller("g").cache_salt("g", "") != caller("a", "g").cache_salt("a", "")
    assert ANYBODY.cache_salt("a", "x") == "x"


def test_the_command_shows_a_key_once_and_keeps_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    run = CliRunner()
    made = run.invoke(app, ["new", "alice", "--file", str(path), "--tokens-per-minute", "9"])
    key = made.output.strip()
    (kept,) = parse_keys(path.read_text())
    assert kept.sha256 == hash_of(key) and kept.tokens_per_minute == 9 and kept.tenant == "alice"
    assert key not in path.read_text()
    assert os.stat(path).st_mode & 0o777 == 0o600
    again = run.invoke(app, ["new", "alice", "--file", str(path)])
    assert isinstance(again.exception, BatonError)
    assert "alice" in run.invoke(app, ["ls", str(path)]).output
    shown = run.invoke(app, ["new", "bob", "--admin"]).output
    key, line = (part.partition(": ")[2].strip() for part in shown.splitlines())
    (bob,) = parse_keys(line)
    assert bob.admin and bob.sha256 == hash_of(key)
    refused = run.invoke(app, ["new", "b b"]).exception
    assert isinstance(refused, SettingsError)
    assert "'b b'" in str(refused) and len(str(refused).splitlines()) == 1


def test_a_key_never_joins_the_line_before_it(tmp_path: Path) -> None:
    """A last line without its end once made one line of two keys, and the file unreadable."""
    path = tmp_path / "keys.toml"
    run = CliRunner()
    run.invoke(app, ["new", "alice", "--file", str(path)])
    path.write_text(path.read_text().rstrip("\n"))
    run.invoke(app, ["new", "bob", "--file", str(path)])
    assert [key.name for key in parse_keys(path.read_text())] == ["alice", "bob"]
    missing = run.invoke(app, ["new", "eve", "--file", str(tmp_path / "no" / "keys.toml")])
    assert "cannot be written" in str(missing.exception)


def test_a_new_key_is_not_written_into_another_keys_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was, with exit code 0, and the file could be read no more."""
    path = tmp_path / "keys"
    path.write_text(f'[alice]\nsha256 = "{hash_of(new_key())}"\n')
    before = path.read_text()
    with pytest.raises(SystemExit) as ended:
        main(["keys", "new", "bob", "--file", str(path)])
    assert ended.value.code == 1 and "last table" in capsys.readouterr().err
    assert path.read_text() == before
