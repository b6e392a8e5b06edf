"""The private authority: what it writes, who may read it, when it renews."""

import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.certs import app
from baton.cluster.errors import BatonError, SettingsError
from baton.cluster.tls import TlsFolder, authority
from baton.cluster.tls.authority import CA_KEY, Order
from baton.cluster.tls.folder import CA, CERT, KEY
from baton.cluster.tls.keeper import Keeper
from baton.cluster.tls.peers import ROLES, allowed
from tests.support.tls import DAY, make_certificates


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_keys_are_readable_by_their_owner_only_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        folder = make_certificates(tmp_path / "ca")
    finally:
        os.umask(old)
    assert mode(folder) == mode(folder / "decode") == 0o700
    assert mode(folder / CA_KEY) == mode(folder / "decode" / KEY) == 0o600
    assert not (folder / "decode" / CA_KEY).exists()


def test_an_authority_is_never_overwritten(tmp_path: Path) -> None:
    authority.create(tmp_path, DAY)
    key = (tmp_path / CA_KEY).read_bytes()
    with pytest.raises(BatonError, match="already"):
        authority.create(tmp_path, DAY)
    assert (tmp_path / CA_KEY).read_bytes() == key


def test_a_certificate_is_renewed_in_the_last_third_of_its_life(tmp_path: Path) -> None:
    authority.create(tmp_path, DAY)
    worker = tmp_path / "worker"
    order = Order("decode", ("node-1", "10.0.0.7"), timedelta(hours=3))
    authority.issue(tmp_path, worker, order)
    issued, now = authority.read(worker), datetime.now(UTC)
    assert issued.order == order
    assert not issued.is_due(now + timedelta(minutes=119))
    assert issued.is_due(now + timedelta(minutes=121))
    key = (worker / KEY).read_bytes()
    assert not authority.renew(tmp_path, worker)
    assert (worker / KEY).read_bytes() == key
    assert authority.renew(tmp_path, worker, always=True)
    assert (worker / KEY).read_bytes() != key
    renewed = authority.read(worker)
    assert renewed.order == order and renewed.serial != issued.serial


@pytest.mark.parametrize("name", [CA, CERT, KEY])
def test_a_folder_that_cannot_work_is_refused_at_start(tmp_path: Path, name: str) -> None:
    folder = make_certificates(tmp_path / "ca") / "prefill"
    (folder / name).write_text("no PEM")
    with pytest.raises(SettingsError, match="not PEM"):
        TlsFolder(folder)
    (folder / name).unlink()
    with pytest.raises(SettingsError, match="must hold"):
        TlsFolder(folder)


def test_files_that_do_not_fit_together_leave_the_old_ones_in_use(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path / "ca") / "prefill"
    tls = TlsFolder(folder)
    before = tls.latest()
    assert tls.latest() is before
    other = make_certificates(tmp_path / "other") / "prefill"
    (folder / KEY).write_bytes((other / KEY).read_bytes())
    assert tls.latest() is before
    (folder / CERT).write_bytes((other / CERT).read_bytes())
    assert tls.latest().cert == (other / CERT).read_bytes()
    with pytest.raises(SettingsError, match="is not the key"):
        (folder / KEY).write_bytes(before.key)
        TlsFolder(folder)


def test_an_expired_certificate_is_refused_at_start(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path / "ca", timedelta(microseconds=1)) / "prefill"
    with pytest.raises(SettingsError, match="has expired on"):
        TlsFolder(folder)


def test_a_keeper_issues_what_is_missing_due_or_for_other_hosts_and_nothing_else(
    tmp_path: Path,
) -> None:
    def serials() -> dict[str, int]:
        return {role: authority.read(tmp_path / "out" / role).serial for role in ROLES}

    keeper = Keeper(tmp_path / "ca", tmp_path / "out", ("a", "127.0.0.1"), timedelta(hours=3))
    assert 7100 < keeper.renew() <= 7200
    first = serials()
    assert 7100 < keeper.renew() <= 7200 and serials() == first
    shutil.rmtree(tmp_path / "out" / "admin")
    short = Order("decode", ("127.0.0.1", "a"), timedelta(microseconds=1))
    authority.issue(tmp_path / "ca", tmp_path / "out" / "decode", short)
    keeper.renew()
    second = serials()
    assert {role for role in ROLES if second[role] != first[role]} == {"admin", "decode"}
    Keeper(tmp_path / "ca", tmp_path / "out", ("b",), timedelta(hours=3)).renew()
    assert not set(serials().values()) & set(second.values())
    assert (tmp_path / "out" / CA).read_bytes() == (tmp_path / "ca" / CA).read_bytes()
    assert mode(tmp_path / "out" / CA) == 0o644


def test_the_commands_make_show_and_renew_certificates(tmp_path: Path) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, [*arguments])
        assert result.exit_code == code, result.output
        return result.output

    ca, worker = str(tmp_path / "ca"), str(tmp_path / "decode-0")
    run("init", ca)
    told = run("issue", "decode", worker, "--host", "decode-0", "-a", ca, "--hours", "48")
    assert "decode for decode-0" in told and "48.0 h left" in told
    assert told == run("show", worker)
    assert "not due" in run("renew", worker, "-a", ca)
    assert "renewed" in run("renew", worker, "-a", ca, "--force")
    for wrong in (
        ["chef", worker, "--host", "x"],
        ["decode", worker],
        ["decode", worker, "--host", ""],
        ["decode", worker, "--host", "höst"],
    ):
        result = CliRunner().invoke(app, ["issue", *wrong, "-a", ca])
        assert isinstance(result.exception, SettingsError)
    run("issue", "decode", worker, "--host", "x", "-a", ca, "--hours", "1e15", code=2)


@pytest.mark.parametrize(
    ("method", "roles"),
    [
        ("/baton.v1.Decode/Generate", ("router",)),
        ("/baton.v1.KVTransfer/Push", ("prefill",)),
        ("/baton.v1.Worker/Replies", ("router",)),
        ("/baton.v1.Worker/ChangeRole", ("admin",)),
        ("/baton.v1.Worker/GetInfo", ("router", "prefill", "decode", "admin")),
    ],
)
def test_a_method_is_for_those_whose_business_it_is(method: str, roles: tuple[str, ...]) -> None:
    """A method that is not in the table would be for everybody."""
    assert allowed(method) == roles
