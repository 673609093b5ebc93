"""All that is recorded of the compiler while a rung runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from service.compilation.evidence import CompilerEvidence, Reason
from service.compilation.rungs import Rung
from service.compilation.torch_internals.capture import CompilationRecords, clear_records
from service.compilation.torch_internals.cudagraphs import Captures, watched_captures
from service.compilation.torch_internals.hooks import traced_hooks


@dataclass(frozen=True)
class Recorder:
    """Holds the records since it began, iteration by iteration."""

    rung: Rung
    device: torch.device
    recording: CompilationRecords
    captures: Captures
    hooks: list[str]

    def end_iteration(self) -> bool:
        """Close an iteration; true if anything was compiled, or a CUDA graph recorded, in it."""
        recorded = self.captures.end_iteration()
        return self.recording.end_iteration() or recorded

    def excuse(self) -> None:
        """Leave out of account what was compiled or recorded since the last iteration was closed."""
        self.recording.excuse()
        self.captures.recorded[-1] = 0

    def evidence(self, warm_up: int, steady: int, switches: Iterable[str] = ()) -> CompilerEvidence:
        """Return the evidence: from iteration ``warm_up`` on nothing should be compiled, from ``steady`` on no CUDA
        graph recorded.
        """
        graphs = self.captures.evidence(self.device, steady) if self.rung.cuda_graphs else None
        seen = self.recording.evidence(warm_up, switches)
        return replace(
            seen, hooks=tuple(Reason(name, count) for name, count in Counter(self.hooks).items()), cuda_graphs=graphs
        )


@contextmanager
def recorder(rung: Rung, device: torch.device) -> Iterator[Recorder]:
    """Record from an empty state; enter it after earlier compilations are forgotten."""
    clear_records()
    captured = watched_captures() if rung.cuda_graphs else nullcontext(Captures())
    with captured as captures, traced_hooks() as hooks:
        yield Recorder(rung, device, CompilationRecords(), captures, hooks)
