"""What `baton up` starts, and with which cores and flags."""

from typing import Any

import pytest

from baton.cli.child_process import ChildSpec
from baton.cli.cores import share_cores
from baton.cli.up import absent_roles
from baton.cli.up_plan import Site, plan
from baton.cli.up_settings import UpSettings
from baton.cluster.errors import SettingsError
from baton.cluster.settings import DecodeSettings, PrefillSettings, RouterSettings
from baton.cluster.settings_source import parse_flags


def planned(*argv: str, cores: tuple[int, ...] = (0, 1)) -> dict[str, ChildSpec]:
    given: dict[str, Any] = parse_flags(UpSettings, list(argv), "baton up")
    site = Site("redis://127.0.0.1:7000/0", 8123, "smollm2", cores, given)
    return {spec.name: spec for spec in plan(UpSettings.build(**given), site)}


def flags_of(spec: ChildSpec) -> list[str]:
    return [word for word in spec.argv if word.startswith("--")]


@pytest.mark.parametrize(
    ("cores", "workers", "shares"),
    [
        ((0, 1), 2, [(0,), (1,)]),
        ((0, 1), 1, [(0, 1)]),
        ((4, 5, 6), 2, [(4, 5), (6,)]),
        ((0, 1, 2, 3, 8, 9, 10, 11), 3, [(0, 1, 2), (3, 8, 9), (10, 11)]),
        ((0, 1), 4, [(0,), (1,), (0,), (1,)]),
        ((3,), 2, [(3,), (3,)]),
    ],
)
def test_cores_are_shared_out_evenly_in_runs(
    cores: tuple[int, ...], workers: int, shares: list[tuple[int, ...]]
) -> None:
    assert share_cores(cores, workers) == shares


def test_two_cores_give_each_of_two_workers_one_core_and_one_thread() -> None:
    specs = planned()
    assert list(specs) == ["router", "prefill-0", "decode-0"]
    prefill = PrefillSettings.load(flags_of(specs["prefill-0"]))
    decode = DecodeSettings.load(flags_of(specs["decode-0"]))
    assert (prefill.cores, prefill.threads) == ((0,), 1)
    assert (decode.cores, decode.threads) == ((1,), 1)
    assert specs["decode-0"].env["OMP_NUM_THREADS"] == "1"


def test_every_child_accepts_its_flags_and_finds_the_same_model() -> None:
    specs = planned("--prefill=2", "--decode=3", cores=tuple(range(8)))
    router = RouterSettings.load(flags_of(specs["router"]))
    workers = [PrefillSettings.load(flags_of(specs[f"prefill-{n}"])) for n in range(2)]
    workers += [DecodeSettings.load(flags_of(specs[f"decode-{n}"])) for n in range(3)]  # type: ignore[misc]
    assert (router.port, router.model) == (8123, "smollm2")
    for worker in workers:
        assert worker.model == "smollm2"
        assert (worker.host, worker.port) == ("127.0.0.1", 0)
    assert sorted(worker.worker_id for worker in workers) == [
        "decode-0",
        "decode-1",
        "decode-2",
        "prefill-0",
        "prefill-1",
    ]


def test_redis_and_its_password_reach_the_children_by_environment_not_by_flag() -> None:
    for spec in planned().values():
        assert spec.env["BATON_REDIS_URL"] == "redis://127.0.0.1:7000/0"
        assert not any("redis" in argument for argument in spec.argv)


def test_several_routers_share_the_port_and_stop_before_the_workers() -> None:
    specs = planned("--routers=3")
    names = [name for name in specs if name.startswith("router")]
    assert names == ["router-0", "router-1", "router-2"]
    for name in names:
        router = RouterSettings.load(flags_of(specs[name]))
        assert (router.port, router.reuse_port) == (8123, True)
        assert specs[name].stop_stage < specs["decode-0"].stop_stage
    assert not RouterSettings.load(flags_of(planned()["router"])).reuse_port


def test_threads_per_worker_overrides_the_share() -> None:
    spec = planned("--threads-per-worker=3")["decode-0"]
    assert DecodeSettings.load(flags_of(spec)).threads == 3
    assert spec.env["OMP_NUM_THREADS"] == "3"


def test_flags_for_children_reach_those_that_have_them() -> None:
    specs = planned(
        "--kv-memory=1GiB", "--no-enable-prefix-cache", "--max-queue=5", "--decode-prefills=never",
        "--pin-quota=0.5", "--transport=grpc", "--wire-codec=int8", "--speculate=ngram",
    )  # fmt: skip
    router = RouterSettings.load(flags_of(specs["router"]))
    decode = DecodeSettings.load(flags_of(specs["decode-0"]))
    assert (router.max_queue, router.decode_prefills) == (5, "never")
    assert (decode.max_queue, decode.kv_memory, decode.enable_prefix_cache) == (5, 1 << 30, False)
    assert (decode.pin_quota, decode.transport, decode.speculate) == (0.5, "grpc", "ngram")
    prefill = PrefillSettings.load(flags_of(specs["prefill-0"]))
    assert (prefill.pin_quota, prefill.transport, prefill.wire_codec) == (0.5, "grpc", "int8")


def test_what_was_not_given_as_a_flag_is_left_to_the_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They read the environment and the file themselves, role tables included."""
    monkeypatch.setenv("BATON_MAX_NUM_SEQS", "3")
    spec = planned()["decode-0"]
    assert not any(flag.startswith("--max-num-seqs") for flag in flags_of(spec))
    assert DecodeSettings.load(flags_of(spec)).max_num_seqs == 3


def test_a_port_in_the_environment_is_the_routers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_PORT", "9000")
    assert DecodeSettings.load(flags_of(planned()["decode-0"])).port == 0


def test_the_router_stops_before_the_workers() -> None:
    stages = {name: spec.stop_stage for name, spec in planned().items()}
    assert stages["router"] < min(stages["prefill-0"], stages["decode-0"])


@pytest.mark.parametrize("flag", ["--prefill=-1", "--decode=many", "--decode=1000"])
def test_impossible_numbers_of_workers_are_a_sentence(flag: str) -> None:
    with pytest.raises(SettingsError, match="must be a whole number from 0 to 64"):
        UpSettings.load([flag])


@pytest.mark.parametrize(
    ("argv", "ray"),
    [
        ([], None),
        (["--ray"], "default"),
        (["--ray", "--decode=2"], "default"),
        (["--ray=a:1"], "a:1"),
    ],
)
def test_ray_may_be_asked_for_with_and_without_an_address(argv: list[str], ray: str | None) -> None:
    assert UpSettings.load(argv).ray == ray


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-decode=2"], "--max-decode needs --ray"),
        (
            ["--ray", "--prefill=3", "--max-prefill=2"],
            "--max-prefill must be at least --prefill, 3",
        ),
        (["--ray", "--gpus-per-worker=1.5"], "--gpus-per-worker must be a part of one GPU"),
        (["--ray", "--tls"], "for this machine only"),
    ],
)
def test_what_makes_no_sense_with_or_without_ray_is_a_sentence(argv: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        UpSettings.load(argv)


def test_where_others_place_a_worker_its_host_and_cores_are_left_to_them() -> None:
    site = Site("redis://127.0.0.1:7000/0", 8123, "smollm2", (), worker_host=None)
    settings = UpSettings.build(ray="auto", cpus_per_worker=3)
    (_, prefill, _) = plan(settings, site)
    assert not [flag for flag in flags_of(prefill) if flag.startswith(("--host", "--cores"))]
    assert PrefillSettings.load(flags_of(prefill)).threads == 3


@pytest.mark.parametrize(
    ("flags", "absent"),
    [
        ([], []),
        (["--decode=0"], ["decode"]),
        (["--prefill=0"], []),
        (["--prefill=0", "--decode-prefills=never"], ["prefill"]),
    ],
)
def test_who_must_come_from_elsewhere_is_known(flags: list[str], absent: list[str]) -> None:
    assert absent_roles(UpSettings.load(flags)) == absent
