"""Where processes go: pairs in placement groups, routers beside the driver.

A prefill and a decode worker of the same number start as a pair: one group of two bundles, packed
on one node where one has room for both and spread otherwise, because their KV is cheapest to move
within a node. What is added later stands alone. A group outlives its workers' restarts, so that
their resources stay theirs; when a node is lost, Ray finds another place for its bundles.
"""

from functools import partial
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from baton.cli.child_process import ChildSpec
from baton.cli.up_settings import UpSettings
from baton_ray.child import RayChild
from baton_ray.process import Process, driver_settings

Cell = tuple[str, ...]


def cell_of(worker: str, prefill: int, decode: int) -> Cell:
    """The workers that share a placement group with `worker`, among those of the start."""
    number = int(worker.rpartition("-")[2])
    if number < min(prefill, decode):
        return f"prefill-{number}", f"decode-{number}"
    return (worker,)


class Placer:
    """`node_id`: of the driver."""

    def __init__(self, settings: UpSettings, node_id: str) -> None:
        self._settings = settings
        self._node_id = node_id
        self._groups: dict[Cell, PlacementGroup] = {}
        self._started: set[str] = set()
        self.children: dict[str, RayChild] = {}
        """The latest of each name."""

    async def start(self, spec: ChildSpec) -> RayChild:
        """Asks for a place; the child says when it has one."""
        if spec.name.startswith("router"):
            here = NodeAffinitySchedulingStrategy(self._node_id, soft=False)
            options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": here}
            needs = "the node of the driver"
        else:
            options, needs = self._worker_options(spec.name), str(self._bundle)
        actor = Process.options(**options)  # type: ignore[attr-defined]
        ask = partial(actor.remote, spec, driver_settings())
        child = RayChild(spec, ask, needs, proven=not self._first_start(spec.name))
        self.children[spec.name] = child
        return child

    def release(self, worker: str) -> None:
        """Gives back the resources of one that was added and has been removed."""
        group = self._groups.pop((worker,), None)
        if group is not None:
            remove_placement_group(group)
        self.children.pop(worker, None)

    def close(self) -> None:
        """Gives everything back: the job that it belongs to may go on without it."""
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()

    @property
    def _bundle(self) -> dict[str, float]:
        wanted = {"CPU": self._settings.cpus_per_worker, "GPU": self._settings.gpus_per_worker}
        # A bundle must not be empty.
        return {name: count for name, count in wanted.items() if count} or {"CPU": 0.001}

    def _worker_options(self, name: str) -> dict[str, Any]:
        cell = cell_of(name, self._settings.prefill, self._settings.decode)
        if cell not in self._groups:
            self._groups[cell] = placement_group(
                [self._bundle] * len(cell), strategy="PACK", name=f"baton {' '.join(cell)}"
            )
        strategy = PlacementGroupSchedulingStrategy(
            self._groups[cell], placement_group_bundle_index=cell.index(name)
        )
        bundle = self._bundle
        return {
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "scheduling_strategy": strategy,
        }

    def _first_start(self, name: str) -> bool:
        """Whether it is one of those that the cluster begins with, for the first time."""
        role, _, number = name.rpartition("-")
        begins = role not in ("prefill", "decode") or int(number) < getattr(self._settings, role)
        first = begins and name not in self._started
        self._started.add(name)
        return first


def this_node() -> str:
    return str(ray.get_runtime_context().get_node_id())
