"""Times what a process does: when it began, and how long ago that was even if the system's clock is set meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stopwatch:
    """Runs from its construction on. ``began`` is a Unix time in seconds."""

    began: float = field(default_factory=time.time)
    mark: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Return how long it has run, by a clock that nobody sets."""
        return time.monotonic() - self.mark

    @property
    def now(self) -> float:
        """Return the Unix time that follows from the beginning and :attr:`seconds`."""
        return self.began + self.seconds
