"""Knows which calls of compiled units are under way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from service.parallel.boundary import Origin


@dataclass
class UnitCall:
    """A unit's call under way. ``given``: the addresses of its arguments; ``made``: what its graphs have left."""

    origin: Origin
    given: set[int]
    made: list[Tensor] = field(default_factory=list)


class UnitCalls(threading.local):
    """Holds the calls of units that are under way in this thread."""

    current: UnitCall | None = None
    depth = 0

    @contextmanager
    def under_way(self, origin: Origin, given: set[int]) -> Iterator[list[Tensor]]:
        """Hold a call within, and yield the list of what its graphs leave."""
        outer, self.current = self.current, UnitCall(origin, given)
        self.depth += 1
        try:
            yield self.current.made
        finally:
            self.current = outer
            self.depth -= 1
