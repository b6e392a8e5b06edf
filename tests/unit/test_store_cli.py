"""`baton model` talks in sentences and answers with the right exit code."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.model import app
from tests.support.models_on_disk import write_gguf


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    return CliRunner()


def test_a_model_is_added_listed_verified_and_removed(runner: CliRunner, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    added = runner.invoke(app, ["add", str(file), "--name", "mine"])
    assert added.exit_code == 0
    assert added.stdout == f"mine is stored in {tmp_path / 'home/models/mine'}\n"
    listed = runner.invoke(app, ["ls"]).stdout.splitlines()
    assert listed[0].split() == ["NAME", "SIZE", "FINGERPRINT", "FROM"]
    assert listed[1].split()[0] == "mine" and listed[1].split()[-1] == str(file)
    assert "mine is intact" in runner.invoke(app, ["verify", "mine"]).stdout
    assert runner.invoke(app, ["rm", "mine"]).stdout == "mine is removed\n"
    assert file.exists()
    assert "The store is empty" in runner.invoke(app, ["ls"]).stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["add", "/nowhere/x.gguf"], "does not exist; check the path"),
        (["verify", "nothing"], "no model 'nothing' in the store"),
        (["rm", "nothing"], "no model 'nothing' in the store"),
        (["rm", "../x"], "cannot be a model's name"),
    ],
)
def test_what_goes_wrong_is_one_sentence_on_stderr(
    runner: CliRunner, arguments: list[str], sentence: str
) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ") and sentence in result.stderr
    assert "Traceback" not in result.stderr
