"""Records how a program used its compiled modules: calls, step marks, re-entries, results that outlive a step."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from service.parallel.boundary import CallSite, HeldResult, Invocation, Origin, Shapes


@dataclass(frozen=True)
class Occurrence:
    """Something that a program did at ``site`` in ``iteration``."""

    iteration: int
    site: CallSite


@dataclass(frozen=True)
class Mark(Occurrence):
    """A step mark, and the forwards whose backward was still to come: their saved tensors are overwritten.

    ``graphs_wait``: CUDA graphs also report that a forward waits for its backward; ``None`` without them.
    """

    pending: tuple[Origin, ...]
    graphs_wait: bool | None = None


@dataclass(frozen=True)
class Reentry(Occurrence):
    """A call of a module before an earlier forward of it had its backward, or from within a running backward."""

    module: str
    pending: int
    """How many forwards still wait for their backward."""
    in_backward: bool
    begins: bool
    """Whether replays begin with it, unmarked, although that backward has not ended or another is still to run."""


@dataclass(frozen=True)
class StaleRead(Occurrence):
    """A result that is read although replays that began after its own call have written over it."""

    held: HeldResult


@dataclass(frozen=True)
class StaleGradient(Occurrence):
    """A gradient that a backward made, still in use when a call began the next replays."""

    parameter: str


@dataclass(frozen=True)
class RetainedRead(Occurrence):
    """A gradient that the result of a call retains, and that is read."""

    origin: Origin


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
    """How one run of a program used its compiled modules."""

    iterations: int = 0
    """How many the run had."""
    invocations: Mapping[Invocation, int] = field(default_factory=dict)
    """How often each module was called in each way."""
    outside: tuple[Origin, ...] = ()
    """Calls that bypassed the boundary."""
    marks: tuple[Mark, ...] = ()
    """Step marks, with the forwards that still waited for a backward."""
    reentries: tuple[Reentry, ...] = ()
    """Calls of a module before an earlier forward of it had its backward."""
    reads: tuple[StaleRead, ...] = ()
    """Results read after they were overwritten."""
    held: tuple[HeldResult, ...] = ()
    """Results alive a whole round of replays after their own."""
    overlapping: tuple[HeldResult, ...] = ()
    """Results alive when the next round began, which is a mistake only if they are read."""
    gradients: tuple[StaleGradient, ...] = ()
    """Gradients in use after they were overwritten."""
    retained: tuple[RetainedRead, ...] = ()
    """Gradients that the result of a call retains, and that were read."""
    lifetimes: Mapping[str, Lifetimes] = field(default_factory=dict)
    """What became of the results of each module."""
    shapes: Mapping[str, tuple[frozenset[Shapes], ...]] = field(default_factory=dict)
    """The shapes of each module's calls in each iteration."""


@dataclass
class UnitCall:
    """A current call of a unit. ``given``: the addresses of its arguments; ``made``: the tensors its graphs left."""

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
