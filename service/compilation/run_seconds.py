"""Counts the seconds of each run of a process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class RunSeconds:
    """The seconds by name: a run lasts until the next begins, without what is counted by itself meanwhile."""

    tells: Callable[[str], None]
    """Called with the name of each run that begins."""
    seconds: Counter[str] = field(default_factory=Counter)
    _name: str = ""
    _since: float = field(default_factory=time.perf_counter)

    def begin(self, name: str) -> None:
        self._go_on_with(name)
        self.tells(name)

    @contextmanager
    def counted(self, name: str) -> Iterator[None]:
        """Count what happens within by itself, as a part of no run."""
        before = self._name
        self._go_on_with(name)
        try:
            yield
        finally:
            self._go_on_with(before)

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, rounded to milliseconds."""
        self._go_on_with("")
        taken, self.seconds = self.seconds, Counter()
        return {name: round(seconds, 3) for name, seconds in taken.items() if name}

    def _go_on_with(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[self._name] += now - self._since  # type: ignore[assignment]
        self._name, self._since = name, now
