"""Runs the clusters that give a chaos run its devices: on this machine, with parts that are killed and come back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import psutil
from chaos_service import Role

from service.jobs.files import DataLayout
from workers.agent.launching import service_of
from workers.launchers import LauncherContext, LauncherUnavailable, launcher_class
from workers.launchers.ray_job import PROGRAM, RayBundle

_HELPERS = Path(__file__).parents[1] / "tests" / "helpers"
_READY_S = 300.0


class Cluster(ABC):
    """A cluster of two nodes of four CPUs each, in a folder of the run's; ``data`` beside it is the service's."""

    name: str
    """The launcher's."""

    def __init__(self, run: Path) -> None:
        self.folder, self._data = run / "cluster", DataLayout(run / "data")
        self._options = ""

    def start(self) -> dict[str, str]:
        """Start it; return the settings by which a service gets all devices from it."""
        environment = self._start()
        os.environ.update(environment)  # for what is asked from here
        setting = f"TRIVET_{self.name.upper()}_OPTIONS"
        return {"TRIVET_LAUNCHER": self.name, "TRIVET_LAUNCHERS": self.name, setting: self._options, **environment}

    def allocations(self) -> list[str]:
        """Return the requests that the service has not taken back, or that the cluster does not answer."""
        context = LauncherContext(service_of(self._data), self.folder, self._options, 10.0)
        try:
            found = launcher_class(self.name)(context).allocations()
            return [f"{one.id} of {one.job_id}: {one.reason or 'with devices'}" for one in found]
        except LauncherUnavailable as error:
            return [str(error)]

    @abstractmethod
    def _start(self) -> dict[str, str]:
        """Start it; return the variables by which its commands and clients find it."""

    @abstractmethod
    def stop(self) -> None:
        """End all of it."""

    @abstractmethod
    def role(self, process: psutil.Process) -> Role | None:
        """Return which part of the cluster a process is, if it is one."""

    def revive(self, role: Role, words: Sequence[str]) -> None:  # noqa: B027 - there may be nothing to do
        """Start a killed part again, if nothing else does."""


class SlurmCluster(Cluster):
    """``slurmctld`` and two ``slurmd``."""

    name = "slurm"

    def _start(self) -> dict[str, str]:
        subprocess.run([_HELPERS / "slurm_cluster.sh", "start", self.folder], check=True)
        return {"SLURM_CONF": f"{self.folder}/slurm.conf"}

    def stop(self) -> None:
        subprocess.run([_HELPERS / "slurm_cluster.sh", "stop", self.folder], check=True)

    def role(self, process: psutil.Process) -> Role | None:
        name = process.name()
        if name not in ("slurmctld", "slurmd"):
            return None
        return cast(Role, name) if any(str(self.folder) in word for word in process.cmdline()) else None

    def revive(self, role: Role, words: Sequence[str]) -> None:
        if role in ("slurmctld", "slurmd"):
            subprocess.run(words, check=True)


class RayCluster(Cluster):
    """A head and two nodes; their keeper restarts those that end."""

    name = "ray"

    def __init__(self, run: Path) -> None:
        super().__init__(run)
        self._kept: subprocess.Popen[bytes] | None = None
        self._told: Mapping[str, Any] = {}

    def _start(self) -> dict[str, str]:
        self._kept = subprocess.Popen([sys.executable, _HELPERS / "ray_cluster.py", self.folder])
        told, deadline = self.folder / "cluster.json", time.monotonic() + _READY_S
        while not told.exists():
            if self._kept.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the Ray cluster did not start: see {self.folder}")
            time.sleep(0.2)
        self._told = json.loads(told.read_text())
        self._options = f"--address={self._told['address']}"
        return {name: value for name, value in self._told.items() if name != "address"}

    def stop(self) -> None:
        if self._kept is not None:
            self._kept.terminate()
            self._kept.wait()

    def role(self, process: psutil.Process) -> Role | None:
        words = process.cmdline()
        role: Role | None = None
        if (name := process.name()) in ("raylet", "gcs_server"):
            role = cast(Role, name)
        elif words and words[0].startswith(f"ray::{RayBundle.__name__}"):
            role = "ray bundle"
        elif PROGRAM in words:
            role = "ray job"
        is_its = role is not None and process.environ().get("RAY_AUTH_TOKEN") == self._told["RAY_AUTH_TOKEN"]
        return role if is_its else None


def cluster_of(launcher: str, run: Path) -> Cluster | None:
    """Return the cluster of a launcher, and none for the hosts of the service."""
    return next((kind(run) for kind in (SlurmCluster, RayCluster) if kind.name == launcher), None)
