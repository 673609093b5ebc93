"""Where the time of a verification job goes, and the most memory that it took."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

PHASES = ("prepare", "witnesses", "layers", "outputs", "attack", "search")
"""Making the model ready; looking at witnesses; bounding hidden layers; bounding outputs and the property's rows;
attacking; searching what neither decided."""


@dataclass(eq=False)
class Clock:
    """Seconds by phase on this rank; a phase ends when the device has done its work."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.seconds[name] += time.monotonic() - started


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak of the device, or on CPU of this process, which includes what it loaded."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
