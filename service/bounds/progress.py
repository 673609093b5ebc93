"""The progress of an analysis, estimated from the rows that it has bounded."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from threading import Lock

import torch

from service.bounds.network import Network


class OutOfTimeError(Exception):
    """The time of an analysis ended before the analysis."""


def check_time(deadline: float) -> None:
    """Raise :class:`OutOfTimeError` after ``deadline`` (``time.monotonic``)."""
    if time.monotonic() > deadline:
        raise OutOfTimeError


@dataclass(eq=False)
class ProgressMeter:
    """Tells which share of an analysis is done, from 0 to 1: rows bounded so far, out of those expected.

    A row costs in proportion to the size of the values through which it is propagated backward. Until a value is
    reached, both bounds of all of its entries are expected. On a CUDA device a row counts when the device has bounded
    it, not when the host has launched it; nothing waits for that. Threads may add concurrently, and tell one after
    the other.
    """

    tell: Callable[[float], None]
    _cost: dict[str, float] = field(default_factory=dict)
    _expected: dict[str, float] = field(default_factory=dict)
    _done: float = 0.0
    _running: deque[tuple[torch.cuda.Event, float]] = field(default_factory=deque)
    _lock: Lock = field(default_factory=Lock)

    def start(self, network: Network, names: Iterable[str]) -> None:
        """Begin an analysis that bounds the entries of the values ``names`` and those of the output."""
        sizes = accumulate(float(node.size) for node in network.graph.nodes)
        self._cost = {node.name: cost for node, cost in zip(network.graph.nodes, sizes, strict=True)}
        self._expected = {
            name: 2 * network.nodes[name].size * self._cost[name] for name in {*names, network.graph.output.name}
        }
        self._done = 0.0
        self._running.clear()

    def expect(self, name: str, rows: int) -> None:
        """Expect ``rows`` rows of a value that has been reached."""
        self._expected[name] = rows * self._cost[name]

    def add(self, name: str, rows: int, device: torch.device) -> None:
        """Count ``rows`` bounded rows of a value."""
        with self._lock:
            self._add(rows * self._cost[name], device)

    def _add(self, work: float, device: torch.device) -> None:
        if device.type == "cuda":
            self._running.append((torch.cuda.Event(), work))  # type: ignore[no-untyped-call]
            self._running[-1][0].record()
            while self._running and self._running[0][0].query():  # type: ignore[no-untyped-call]
                self._done += self._running.popleft()[1]
        else:
            self._done += work
        self.tell(min(self._done / max(sum(self._expected.values()), 1.0), 1.0))


@dataclass(eq=False)
class TimeLimit(ProgressMeter):
    """Ends an analysis with :class:`OutOfTimeError` after ``deadline`` (``time.monotonic``), at the next of its
    parts.

    It is for ranks that no other waits for. An analysis that is not begun here is not measured, only ended.
    """

    deadline: float = inf

    def start(self, network: Network, names: Iterable[str]) -> None:
        check_time(self.deadline)
        super().start(network, names)

    def add(self, name: str, rows: int, device: torch.device) -> None:
        check_time(self.deadline)
        if name in self._cost:
            super().add(name, rows, device)

    def expect(self, name: str, rows: int) -> None:
        if name in self._cost:
            super().expect(name, rows)
