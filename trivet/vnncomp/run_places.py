"""Spreads ranks without a service over the GPUs and cores of this host."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from trivet.vnncomp.questions import Device

VISIBLE, THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"


@dataclass(frozen=True)
class RunPlace:
    """Where a rank computes, and the variables of its environment that say so."""

    device: Device
    variables: Mapping[str, str]


@dataclass(frozen=True)
class RunPlaces:
    """Room for ranks at a time: each has one of the ``gpus``, if there are any, and its share of the cores."""

    device: Device
    gpus: tuple[str, ...] = ()
    threads: int | None = None
    _taken: list[int] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    @classmethod
    def here(cls, device: Device, at_once: int = 1) -> RunPlaces:
        """Return room for ``at_once`` ranks on this host; a number of threads that the user chose stays."""
        gpus = () if device == "cpu" else _gpus(os.environ)
        found: Device = device if device != "auto" else "cuda" if gpus else "cpu"
        is_shared = at_once > 1 and THREADS not in os.environ
        return cls(found, gpus, max(1, len(os.sched_getaffinity(0)) // at_once) if is_shared else None)

    @contextmanager
    def taken(self) -> Iterator[RunPlace]:
        """Yield a place on the GPU that has the fewest ranks by now."""
        variables = {} if self.threads is None else {THREADS: str(self.threads)}
        if not self.gpus:
            yield RunPlace(self.device, variables)
            return
        with self._lock:
            gpu = min(range(len(self.gpus)), key=self._taken.count)
            self._taken.append(gpu)
        try:
            yield RunPlace(self.device, variables | {VISIBLE: self.gpus[gpu]})
        finally:
            with self._lock:
                self._taken.remove(gpu)


def _gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that a process may use, each as :data:`VISIBLE` names it."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return ()
    if (chosen := environment.get(VISIBLE)) is not None:
        return tuple(each.strip() for each in chosen.split(",") if each.strip())
    words = [tool, "--query-gpu=uuid", "--format=csv,noheader"]
    listed = subprocess.run(words, capture_output=True, text=True, check=False)
    return tuple(listed.stdout.split()) if listed.returncode == 0 else ()
