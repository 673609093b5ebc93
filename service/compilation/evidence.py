"""Holds the compiler's actions while a rung ran, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GraphBreak:
    """A place where a graph ended early, or for which a function is not compiled at all."""

    reason: str
    file: str = ""
    line: int = 0
    """0, and the names empty, if the compiler named no place."""
    function: str = ""
    count: int = 1

    def __str__(self) -> str:
        place = f" at {self.file}:{self.line} in {self.function}" if self.line else ""
        return f"the graph breaks{place}: {self.reason}"


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
    """What became of CUDA graphs."""

    captures: int = 0
    """How many were recorded."""
    skips: tuple[Reason, ...] = ()
    """Why others were not."""
    rerecords: tuple[Reason, ...] = ()
    """Why some were recorded again without a new shape."""
    late: tuple[int, ...] = ()
    """Iterations after warm-up that still recorded one."""
    recorded: tuple[int, ...] = ()
    """How many each iteration recorded."""


@dataclass(frozen=True)
class CompilerEvidence:
    """What the compiler did over one rung and phase."""

    graphs: int = 0
    """Forward graphs that were captured."""
    backward_graphs: int = 0
    """Backward graphs that were compiled."""
    operations: int = 0
    """Operators in all forward graphs."""
    graph_breaks: tuple[GraphBreak, ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    late: tuple[int, ...] = ()
    """Iterations after warm-up that still compiled something."""
    limit_hits: tuple[str, ...] = ()
    """Functions that exceeded the recompile limit, and run uncompiled since."""
    failures: tuple[str, ...] = ()
    """Failures of the compiler that raised nothing."""
    switches: tuple[str, ...] = ()
    """Settings that let code run uncompiled in silence."""
    hooks: tuple[Reason, ...] = ()
    """Functions of FSDP2 that were traced into a graph."""
    autograd_captures: int = 0
    """Backwards that compiled autograd took over."""
    cuda_graphs: CudaGraphs | None = None
    """``None`` if the rung does not use them."""

    @property
    def fullgraph(self) -> bool:
        """Return whether all called code ran inside graphs without a break."""
        return self.graphs > 0 and not (self.graph_breaks or self.limit_hits or self.failures)
