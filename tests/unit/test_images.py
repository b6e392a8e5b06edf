"""What the images are made of, and whether this machine can run them; nothing is built here."""

import os
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text(encoding="utf-8")
ENGINE = ROOT / "deploy/docker/engine.sh"


def copied() -> list[str]:
    """What the Dockerfile takes from this tree."""
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, flags=re.MULTILINE)
    return [path for line in lines for path in line.split()]


def test_what_the_dockerfile_copies_is_there_and_reaches_the_engine() -> None:
    """The package baton_ray did not: only a build saw that it was left out."""
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
    assert copied() and "*" in rules
    for path in copied():
        assert (ROOT / path).exists(), path
        assert any(fnmatch(path, s) or path.startswith(f"{s}/") for s in sent), path


@pytest.mark.parametrize(
    ("refusing", "said"),
    [("unshare", "no namespaces of its own: Operation not permitted"), ("id", "takes root")],
)
def test_a_machine_that_cannot_run_containers_is_told_apart_and_says_why(
    tmp_path: Path, refusing: str, said: str
) -> None:
    for name in ("docker", refusing):
        (tmp_path / name).write_text("#!/bin/sh\necho Operation not permitted >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    if refusing != "id":
        (tmp_path / "id").write_text("#!/bin/sh\necho 0\n")
        (tmp_path / "id").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", ENGINE, "able"], env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 1 and said in done.stderr
