"""Builds ``trivet-client`` from the sources of ``trivet``: the packages that its commands and its client import.

Version, requirements and commands are those of ``trivet``, whose ``pyproject.toml`` alone names them.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parents[1]
ROOMS = ["trivet", "service.formats", "service.jobs", "service.schedules", "service.torch_internals"]
STORE = ["service.jobs.store"]

settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
whole = settings["project"]


def within(packages: list[str]) -> list[str]:
    return [pattern for package in packages for pattern in (package, f"{package}.*")]


setup(
    name="trivet-client",
    version=whole["version"],
    description="Python client and commands of Trivet, without the service and without PyTorch",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    python_requires=whole["requires-python"],
    install_requires=whole["dependencies"],
    entry_points={"console_scripts": [f"{name} = {place}" for name, place in whole["scripts"].items()]},
    package_dir={"": ".."},
    packages=find_packages("..", include=["service", *within(ROOMS)], exclude=within(STORE)),
    package_data={"trivet": settings["tool"]["setuptools"]["package-data"]["trivet"]},
)
