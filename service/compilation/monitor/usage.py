"""Records how a program used its compiled modules: calls, step marks, re-entries, and results that outlived their
step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from service.parallel.boundary import CallSite, HeldResult, Invocation, Origin, Shapes


@dataclass(frozen=True)
class Mark:
    """A step mark, and the forwards whose backward was still to come: their saved tensors are overwritten.

    ``graphs_wait``: CUDA graphs also report that a forward waits for its backward; ``None`` without them.
    """

    iteration: int
    site: CallSite
    pending: tuple[Origin, ...]
    graphs_wait: bool | None = None


@dataclass(frozen=True)
class Reentry:
    """A call of a module that has ``pending`` forwards before it, or one from within a running backward.

    ``begins``: replays begin with it, unmarked, although that backward has not ended or another is still to run.
    """

    module: str
    iteration: int
    site: CallSite
    pending: int
    in_backward: bool
    begins: bool


@dataclass(frozen=True)
class StaleRead:
    """A result that is read at ``site`` although replays that began after its own call have written over it."""

    held: HeldResult
    iteration: int
    site: CallSite


@dataclass(frozen=True)
class StaleGradient:
    """A gradient that a backward made, still in use when a call at ``site`` began the next replays."""

    parameter: str
    iteration: int
    site: CallSite


@dataclass(frozen=True)
class RetainedRead:
    """A gradient that the result of a call retains, read at ``site``."""

    origin: Origin
    iteration: int
    site: CallSite


@dataclass(frozen=True)
class Lifetimes:
    """Counts the results of one module's calls: gone before the next replays, copied by the boundary, or held
    over at least one of them.
    """

    consumed: int
    copied: int
    held: int


@dataclass(frozen=True)
class Usage:
    """Describes one run of a program. ``outside``: calls that bypassed the boundary. ``reads``: results read after they
    were overwritten; ``held``: those alive a whole round of replays after their own; ``overlapping``: those alive when
    the next round began, which is a mistake only if they are read. ``shapes``: the shapes of each module's calls in
    each iteration.
    """

    iterations: int = 0
    invocations: Mapping[Invocation, int] = field(default_factory=dict)
    outside: tuple[Origin, ...] = ()
    marks: tuple[Mark, ...] = ()
    reentries: tuple[Reentry, ...] = ()
    reads: tuple[StaleRead, ...] = ()
    held: tuple[HeldResult, ...] = ()
    overlapping: tuple[HeldResult, ...] = ()
    gradients: tuple[StaleGradient, ...] = ()
    retained: tuple[RetainedRead, ...] = ()
    lifetimes: Mapping[str, Lifetimes] = field(default_factory=dict)
    shapes: Mapping[str, tuple[frozenset[Shapes], ...]] = field(default_factory=dict)


@dataclass
class UnitCall:
    """A current call of a unit. ``given``: the addresses of its arguments; ``made``: the tensors that its graphs have
    left.
    """

    origin: Origin
    given: set[int]
    made: list[Tensor] = field(default_factory=list)


class UnitCalls(threading.local):
    """Holds the current calls of units in this thread."""

    current: UnitCall | None = None
    depth = 0

    @contextmanager
    def under_way(self, origin: Origin, given: set[int]) -> Iterator[list[Tensor]]:
        """Hold a call, and yield the list of tensors that its graphs leave."""
        outer, self.current = self.current, UnitCall(origin, given)
        self.depth += 1
        try:
            yield self.current.made
        finally:
            self.current = outer
            self.depth -= 1
