"""Lists the launchers, which give devices to an attempt and start its supervisors.

``local`` is the placement of the service on the hosts that report themselves. Any other launcher asks a
cluster's scheduler, through a class of :mod:`workers.launchers` that only workers import. A package brings one as an
entry point::

    [project.entry-points."trivet.launchers"]
    flux = "example.flux:Flux"          # a workers.launchers.Launcher
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Literal

LOCAL = "local"
LAUNCHER_NAME = re.compile(r"^[a-z]{2,20}$")
GROUP = "trivet.launchers"
_BUILT_IN = {
    "kubernetes": "workers.launchers.kubernetes:Kubernetes",
    "ray": "workers.launchers.ray:Ray",
    "slurm": "workers.launchers.slurm:Slurm",
}
_DEVICES = frozenset({"auto", "cuda", "cpu"})


def launchers() -> dict[str, str]:
    """Return the class of each scheduler's launcher as ``package.module:class``, by name. Unusable or taken
    names are left out.
    """
    installed = {point.name: point.value for point in entry_points(group=GROUP)}
    usable = {
        name: value
        for name, value in sorted(installed.items())
        if LAUNCHER_NAME.fullmatch(name) and name != LOCAL and name not in _DEVICES
    }
    return usable | _BUILT_IN


def unknown_launcher(name: str) -> str:
    return f"there is no launcher {name}; there are {', '.join([LOCAL, *launchers()])}"


@dataclass(frozen=True)
class PendingLaunch:
    """A pending job for which a launcher must get devices."""

    job_id: str
    kind: str
    ranks: int
    """Number of devices in all."""
    max_hosts: int
    device: Literal["auto", "cuda", "cpu"]
    priority: int
    """-100 to 100; higher comes first."""
    timeout_s: float | None
    """Most seconds for which the devices are needed; ``None`` for no limit."""
