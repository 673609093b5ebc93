"""Holds the compiler's actions while a rung ran, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GraphBreak:
    """Says where a graph ended early. ``line`` is 0 and the rest empty if the compiler named no place."""

    reason: str
    file: str = ""
    line: int = 0
    function: str = ""
    count: int = 1


@dataclass(frozen=True)
class Recompile:
    """A frame compiled again: its compile id, the failed guard, the place that needed it, and the iteration."""

    frame: str
    guard: str
    function: str
    file: str
    line: int
    iteration: int


@dataclass(frozen=True)
class Reason:
    """Says why something was done or left out, and how often."""

    reason: str
    count: int = 1


@dataclass(frozen=True)
class CudaGraphs:
    """Holds the fate of CUDA graphs. ``captures`` were recorded; ``skips`` were not, with reasons;
    ``rerecords`` were recorded again without a new shape; ``late``: iterations after warm-up that still
    recorded one; ``recorded``: the number recorded in each iteration.
    """

    captures: int = 0
    skips: tuple[Reason, ...] = ()
    rerecords: tuple[Reason, ...] = ()
    late: tuple[int, ...] = ()
    recorded: tuple[int, ...] = ()


@dataclass(frozen=True)
class CompilerEvidence:
    """Counts over one rung and phase.

    ``graphs``: forward graphs captured with ``operations`` operators in all; ``backward_graphs``: backward graphs
    compiled; ``late``: iterations after warm-up that still compiled something; ``limit_hits``: functions that
    exceeded the recompile limit and run uncompiled since; ``failures``: compile failures that raised nothing;
    ``switches``: settings that let code run uncompiled in silence; ``hooks``: functions of FSDP2 that were traced into
    a graph, and how often; ``autograd_captures``: backwards that compiled autograd took over; ``cuda_graphs``:
    ``None`` if the rung does not use them.
    """

    graphs: int = 0
    backward_graphs: int = 0
    operations: int = 0
    graph_breaks: tuple[GraphBreak, ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    late: tuple[int, ...] = ()
    limit_hits: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    hooks: tuple[Reason, ...] = ()
    autograd_captures: int = 0
    cuda_graphs: CudaGraphs | None = None

    @property
    def fullgraph(self) -> bool:
        """Return whether all called code ran inside graphs without a break."""
        return self.graphs > 0 and not (self.graph_breaks or self.limit_hits or self.failures)
