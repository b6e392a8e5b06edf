"""The Kubernetes and KubeRay manifests agree with the product and with each other."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from baton.cli.main import app
from baton.cluster.settings import DecodeSettings, PrefillSettings, RouterSettings, WorkerSettings
from baton.worker import exposition
from tests.unit.test_docs import commands

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy/k8s"
Manifest = dict[str, Any]


def manifests(*paths: Path) -> list[Manifest]:
    found = [yaml.safe_load_all(path.read_text()) for path in paths]
    return [manifest for documents in found for manifest in documents]


CORE = manifests(*(path for path in K8S.glob("*.yaml") if path.name != "kustomization.yaml"))
DEPLOYMENTS = {m["metadata"]["name"]: m for m in CORE if m["kind"] == "Deployment"}
WORKERS: dict[str, type[WorkerSettings]] = {"prefill": PrefillSettings, "decode": DecodeSettings}


def pod(name: str) -> Manifest:
    found: Manifest = DEPLOYMENTS[name]["spec"]["template"]
    return found


def container(name: str) -> Manifest:
    (found,) = pod(name)["spec"]["containers"]
    return dict(found)


def environment(name: str) -> dict[str, str | None]:
    return {entry["name"]: entry.get("value") for entry in container(name).get("env", ())}


def test_the_kustomization_names_every_file() -> None:
    kustomization = yaml.safe_load((K8S / "kustomization.yaml").read_text())
    files = {path.name for path in K8S.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == files


@pytest.mark.parametrize("name", ["redis", "router", "prefill", "decode"])
def test_no_container_has_root_privileges_or_a_writable_root_file_system(name: str) -> None:
    spec = pod(name)["spec"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
    assert spec["automountServiceAccountToken"] is False
    for one in [*spec["containers"], *spec.get("initContainers", ())]:
        assert one["securityContext"]["readOnlyRootFilesystem"]
        assert one["securityContext"]["allowPrivilegeEscalation"] is False
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert one["resources"]["limits"]["memory"] and one["resources"]["requests"]["cpu"]


@pytest.mark.parametrize("name", ["router", "prefill", "decode"])
def test_every_variable_is_a_setting_of_the_process_and_every_command_exists(name: str) -> None:
    cls = WORKERS.get(name, RouterSettings)
    kustomization = yaml.safe_load((K8S / "kustomization.yaml").read_text())
    shared = dict(line.split("=") for line in kustomization["configMapGenerator"][0]["literals"])
    given = {k: v for k, v in environment(name).items() if k.startswith("BATON_")}
    fields = {key.removeprefix("BATON_").lower(): value for key, value in given.items()}
    assert set(fields) <= set(cls.model_fields)
    cls.build(**{key: value for key, value in fields.items() if value is not None})
    for key in shared:
        assert key.removeprefix("BATON_").lower() in PrefillSettings.model_fields
    assert set(container(name)["args"]) <= commands(app)


@pytest.mark.parametrize("name", WORKERS)
def test_a_pod_is_killed_only_after_both_drains_could_end(name: str) -> None:
    """preStop drains, then SIGTERM does; Kubernetes counts both."""
    (_, _, command) = container(name)["lifecycle"]["preStop"]["exec"]["command"]
    pre_stop = float(command.rpartition(" ")[2])
    own = float(environment(name)["BATON_DRAIN_TIMEOUT_S"] or 0)
    assert pod(name)["spec"]["terminationGracePeriodSeconds"] > pre_stop + own


def selectors() -> Iterator[tuple[str, dict[str, str]]]:
    for manifest in CORE + manifests(K8S / "monitoring/monitors.yaml"):
        spec, label = manifest.get("spec", {}), f"{manifest['kind']} {manifest['metadata']['name']}"
        found = spec.get("selector") or spec.get("podSelector")
        if found is not None:
            yield label, found.get("matchLabels", found)


@pytest.mark.parametrize(("label", "selector"), list(selectors()))
def test_every_selector_selects_something(label: str, selector: dict[str, str]) -> None:
    labels = [pod(name)["metadata"]["labels"] for name in DEPLOYMENTS]
    assert [found for found in labels if selector.items() <= found.items()], label


def test_policies_monitors_and_services_name_ports_that_pods_have() -> None:
    ports = {port["name"] for name in DEPLOYMENTS for port in container(name)["ports"]}
    named = set()
    for manifest in CORE:
        spec = manifest.get("spec", {})
        if manifest["kind"] == "NetworkPolicy":
            rules = spec.get("ingress", ())
            named |= {port["port"] for rule in rules for port in rule.get("ports", ())}
        elif manifest["kind"] == "Service":
            named |= {port["targetPort"] for port in spec["ports"]}
    for monitor in manifests(K8S / "monitoring/monitors.yaml"):
        spec = monitor["spec"]
        ends = [*spec.get("endpoints", ()), *spec.get("podMetricsEndpoints", ())]
        named |= {end["port"] for end in ends}
    assert named == ports


def test_pools_scale_by_metrics_that_are_exported_and_offered_to_kubernetes() -> None:
    rules = (K8S / "monitoring/adapter-values.yaml").read_text()
    exported = Path(exposition.__file__).read_text() + (ROOT / "router/metrics.py").read_text()
    scalers = [m for m in CORE if m["kind"] == "HorizontalPodAutoscaler"]
    assert {m["spec"]["scaleTargetRef"]["name"] for m in scalers} == set(WORKERS)
    for metric in [metric for scaler in scalers for metric in scaler["spec"]["metrics"]]:
        name = metric[metric["type"].lower()]["metric"]["name"]
        short = name.removeprefix("baton_").removeprefix("worker_")
        if name == "baton_worker_kv_used":
            assert "baton_worker_kv_blocks" in rules and f"as: {name}" in rules
        else:
            assert short in exported and short.split("_")[0] in rules


@pytest.mark.parametrize("name", ["raycluster.yaml", "rayservice.yaml"])
def test_the_pods_of_a_ray_cluster_are_pods(name: str) -> None:
    """The kinds of ray.io have no schema here; what they hold of Kubernetes does."""
    cluster = manifests(ROOT / "deploy/ray" / name)[0]["spec"]
    cluster = cluster.get("rayClusterConfig", cluster)
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        template = copy.deepcopy(group["template"]) | {"apiVersion": "v1", "kind": "Pod"}
        kubernetes_validate.validate(template, kubernetes_validate.latest_version(), strict=True)
        for one in template["spec"]["containers"]:
            assert one["securityContext"]["allowPrivilegeEscalation"] is False
    cpus = {float(group["rayStartParams"]["num-cpus"]) for group in groups[1:]}
    assert cpus == {2.0}, "a pair of workers shares a pod"
