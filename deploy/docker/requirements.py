"""Prints what pyproject.toml requires, with the extras named: a layer that code does not change."""

import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = [line for name in sys.argv[1:] for line in project["optional-dependencies"][name]]
print(*project["dependencies"], *extras, sep="\n")
