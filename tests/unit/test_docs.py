"""What the documents name exists, and what exists is in them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from baton.cli import cache, certs, keys, main, model
from baton.cli.settings_table import TABLES, replace_tables

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
GROUPS = {"model": model.app, "cache": cache.app, "certs": certs.app, "keys": keys.app}


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", prose(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(app: typer.Typer) -> set[str]:
    names = (
        info.name or getattr(info.callback, "__name__", "") for info in app.registered_commands
    )
    return {name.replace("_", "-") for name in names}


def code(text: str) -> Iterator[str]:
    """Lines of code blocks and spans of code in prose."""
    for block in re.findall(r"^```.*?\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        yield from block.splitlines()
    yield from re.findall(r"`([^`\n]+)`", prose(text))


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z-]+):.*## ", makefile, flags=re.MULTILINE))


@pytest.fixture(params=DOCUMENTS, ids=NAMES)
def document(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_relative_links_lead_to_files_and_headings(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in anchors(found.read_text(encoding="utf-8")), f"{target}: no heading"


def test_commands_that_are_named_exist(document: Path) -> None:
    known = commands(main.app) | GROUPS.keys()
    for line in code(document.read_text(encoding="utf-8")):
        if not (words := re.match(r"(?:\.venv/bin/)?baton +([a-z][\w-]*)(?: +([a-z]+)\b)?", line)):
            continue
        command, sub = words.groups()
        assert command in known, f"there is no `baton {command}`"
        if command in GROUPS and sub:
            assert sub in commands(GROUPS[command]), f"there is no `baton {command} {sub}`"


def test_make_targets_that_are_named_exist(document: Path) -> None:
    for line in code(document.read_text(encoding="utf-8")):
        if named := re.match(r"make +([a-z-]+)\b", line):
            assert named[1] in make_targets(), f"there is no `make {named[1]}`"


def test_every_command_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in commands(main.app) | GROUPS.keys():
        assert f"`baton {command}`" in readme


def test_every_make_target_is_in_contributing() -> None:
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for target in make_targets() - {"help"}:
        assert f"`make {target}`" in contributing


def test_every_path_of_the_readmes_tree_exists() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = readme.partition("## Files")[2].partition("```text\n")[2].partition("```")[0]
    paths = [line.split()[0] for line in tree.splitlines()]
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_settings_are_documented_as_they_are() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for title, cls in TABLES:
        section = text.partition(f"### {title}: ")[2].partition("### ")[0]
        for name in cls.model_fields:
            assert f"| `--{name.replace('_', '-')}`" in section, f"{title} lacks {name}"
    assert text == replace_tables(text), (
        "run: .venv/bin/python -m baton.cli.settings_table docs/configuration.md"
    )


def test_the_architecture_fits_on_a_page() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 100
