"""Where settings come from, and what a wrong one says."""

from pathlib import Path

import pytest

from baton.cluster.errors import SettingsError
from baton.cluster.settings import DecodeSettings, PrefillSettings, RouterSettings, load_or_exit

TOML = """
model = "shared"
max_queue = 7
[prefill]
max_queue = 8
chunk_size = 64
[decode]
max_num_seqs = 3
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "baton.toml"
    path.write_text(TOML)
    return path


def test_defaults_are_those_of_the_documentation() -> None:
    router, worker = RouterSettings.load([]), PrefillSettings.load([])
    assert (router.host, router.port, router.max_queue, router.max_running) == (
        "127.0.0.1",
        8000,
        256,
        1024,
    )
    assert (worker.port, worker.block_size, worker.kv_memory, worker.dtype) == (
        0,
        16,
        512 << 20,
        "bfloat16",
    )
    assert worker.enable_prefix_cache and worker.cores is None


def test_flags_win_over_the_environment_over_the_file_over_defaults(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ["--config", str(toml)]
    assert RouterSettings.load([]).max_queue == 256
    assert RouterSettings.load(file).max_queue == 7
    monkeypatch.setenv("BATON_MAX_QUEUE", "9")
    assert RouterSettings.load(file).max_queue == 9
    assert RouterSettings.load([*file, "--max-queue=10"]).max_queue == 10


def test_the_file_may_be_named_by_the_environment(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CONFIG", str(toml))
    assert RouterSettings.load([]).model == "shared"


def test_a_role_table_wins_over_shared_keys_and_leaves_other_roles_alone(toml: Path) -> None:
    prefill = PrefillSettings.load(["--config", str(toml)])
    decode = DecodeSettings.load(["--config", str(toml)])
    assert (prefill.model, prefill.max_queue, prefill.chunk_size) == ("shared", 8, 64)
    assert (decode.max_queue, decode.max_num_seqs, decode.chunk_size) == (7, 3, None)


def test_a_step_has_room_for_prompts_beside_a_token_of_every_sequence() -> None:
    """With as many tokens as sequences, a prompt beside a full batch got one token a step."""
    common = ["--model", "m"]
    assert DecodeSettings.load(common).tokens_per_step == 128
    assert DecodeSettings.load([*common, "--max-num-seqs", "500"]).tokens_per_step == 1000
    assert DecodeSettings.load([*common, "--chunk-size", "64"]).tokens_per_step == 64


def test_an_empty_environment_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_PORT", "")
    assert RouterSettings.load([]).port == 8000


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--block-size", "48"], "--block-size must be a power of two from 1 to 256, not '48'."),
        (["--block-size", "512"], "--block-size must be a power of two"),
        (["--block-size", "0"], "--block-size must be a power of two"),
        (["--port", "65536"], "--port must be a port from 0"),
        (["--port", "http"], "--port must be a port from 0"),
        (["--max-queue", "0"], "--max-queue must be a whole number of at least 1, not '0'."),
        (["--max-queue", "1.5"], "--max-queue must be a whole number"),
        (["--kv-memory", "lots"], "--kv-memory must be a size such as 512MiB"),
        (["--kv-memory", "0"], "--kv-memory must be a size such as 512MiB"),
        (["--cores", "3-1"], "--cores must be a list of cores such as 0-1,3"),
        (["--dtype", "int3"], "--dtype must be bfloat16 or float32, not 'int3'."),
        (["--kv-policy", "lru"], "--kv-policy must be full, streaming(sinks=4,window=1024)"),
        (["--kv-policy", "streaming(window=0)"], "any window of at least 1"),
        (["--kv-policy", "snapkv(budget=101%)"], "up to 100 % of the prompt, not 'snapkv("),
        (["--lease-s", "0"], "--lease-s must be a positive number of seconds"),
        (["--lease-s", "nan"], "--lease-s must be a positive number of seconds"),
        (["--redis-url", "localhost"], "--redis-url must be a URL such as redis://"),
        (["--log-level", "loud"], "--log-level must be debug, info, warning or error"),
        (["--worker-id", "a b"], "--worker-id must be a name without spaces"),
        (["--max-model-len", "1"], "--max-model-len must leave room"),
        (["--config", "/does/not/exist"], "Cannot read --config /does/not/exist"),
        (["--max-que", "3"], "unrecognized arguments: --max-que"),
        (["--port"], "expected one argument"),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_a_wrong_flag_is_a_sentence_that_names_it_and_what_it_accepts(
    flags: list[str], said: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        PrefillSettings.load(flags)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_environment_variable_is_said_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CORES", "two")
    with pytest.raises(SettingsError, match="--cores must be a list of cores"):
        DecodeSettings.load([])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("port = ", "is not valid TOML"),
        ("[prefill]\nmax_quee = 1", "there is no setting named 'max_quee'"),
        ("prefill = 3", "prefill must be a table"),
        ("max_quee = 1", "there is no setting named 'max_quee'"),
        ("[prefill]\nmax_queue = 0", "--max-queue must be"),
    ],
)
def test_a_wrong_file_is_a_sentence(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "baton.toml"
    path.write_text(content)
    with pytest.raises(SettingsError) as caught:
        PrefillSettings.load(["--config", str(path)])
    assert said in str(caught.value)


def test_wrong_settings_end_a_process_with_code_2_and_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        load_or_exit(RouterSettings, ["--port", "x"], "router")
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "baton: --port must be a port from 0 (any free one) to 65535, not 'x'."
    ]


def test_help_lists_every_flag_and_ends_with_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        DecodeSettings.load(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for name in DecodeSettings.model_fields:
        assert f"--{name.replace('_', '-')}" in shown


def test_flags_made_from_settings_rebuild_them_whatever_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = ["--cores=0-2", "--no-enable-prefix-cache", "--kv-memory=1GiB", "--lease-s=2.5"]
    settings = DecodeSettings.load(flags)
    monkeypatch.setenv("BATON_BLOCK_SIZE", "64")
    monkeypatch.setenv("BATON_ENABLE_PREFIX_CACHE", "true")
    assert DecodeSettings.load(settings.to_flags()) == settings


def test_redis_has_a_short_flag() -> None:
    assert RouterSettings.load(["--redis", "redis://a:1/0"]).redis_url == "redis://a:1/0"


def test_workers_get_different_names_that_tell_their_role() -> None:
    names = {PrefillSettings.load([]).worker_id for _ in range(20)}
    assert len(names) == 20 and all(name.startswith("prefill-") for name in names)
    assert DecodeSettings.load([]).worker_id.startswith("decode-")


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        ([], "127.0.0.1:7"),
        (["--host=10.0.0.5"], "10.0.0.5:7"),
        (["--advertise=worker.example:99"], "worker.example:99"),
    ],
)
def test_the_advertised_address_is_host_and_port_unless_given(
    flags: list[str], address: str
) -> None:
    assert PrefillSettings.load(flags).advertised(7) == address


def test_a_wildcard_host_is_never_advertised() -> None:
    assert not PrefillSettings.load(["--host=0.0.0.0"]).advertised(7).startswith("0.0.0.0")


def test_settings_cannot_be_changed_after_they_are_built() -> None:
    settings = RouterSettings.load([])
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1
