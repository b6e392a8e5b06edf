"""No pickle on any wire, nor in any file: whoever could write it could run code here.

Reads the sources of everything that is shipped. Ray, which pickles the calls between its own
processes, is only used in `deploy/ray`, where it places processes; see docs/security.md.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ("baton", "router", "prefill_service", "decode_service")
# These read or write pickles, or run what they read.
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "jsonpickle",
           "multiprocessing", "xmlrpc"}  # fmt: skip
BUILT_IN = {"eval", "exec", "__import__"}
METHODS = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
           "send_object_list", "recv_object_list", "unsafe_load", "full_load", "read_pickle",
           "to_pickle"}  # fmt: skip


def faults(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] in MODULES:
                yield str(node.module)
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[str]:
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if isinstance(node.func, ast.Name) and node.func.id in BUILT_IN:
        yield node.func.id
    if given.get("allow_pickle", "False") != "False":
        yield "allow_pickle"
    if isinstance(node.func, ast.Attribute):
        name, of = node.func.attr, ast.unparse(node.func.value)
        if name in METHODS:
            yield name
        if (of, name) == ("torch", "save") or (
            (of, name) == ("torch", "load") and given.get("weights_only") != "True"
        ):
            yield f"{of}.{name}"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "import multiprocessing.connection", "from cloudpickle import dumps",
        "torch.load(path)", "torch.load(path, weights_only=False)", "torch.save(x, path)",
        "dist.broadcast_object_list(x)", "group.all_gather_object(x, y)",
        "np.load(path, allow_pickle=True)", "eval(text)", "def f():\n  import dill",
    ],
)  # fmt: skip
def test_the_scan_finds(source: str) -> None:
    assert list(faults(source))


@pytest.mark.parametrize("source", ["torch.load(path, weights_only=True)", "np.load(path)"])
def test_the_scan_lets_pass(source: str) -> None:
    assert not list(faults(source))


def test_nothing_that_is_shipped_reads_or_writes_a_pickle() -> None:
    paths = [path for package in SHIPPED for path in (ROOT / package).rglob("*.py")]
    assert len(paths) > 150
    found = {
        str(path.relative_to(ROOT)): names
        for path in paths
        if (names := list(faults(path.read_text(encoding="utf-8"))))
    }
    assert found == {}
