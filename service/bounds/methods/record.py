"""A method recorded on one shape of boxes, with the rows of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from service.bounds.buffers import overwrite
from service.bounds.interval import Interval
from service.bounds.methods.base import LinearAnalysis
from service.bounds.methods.passes import Passes
from service.bounds.methods.row_plan import Plan, Planned
from service.bounds.network import Network
from service.bounds.options import BoundOptions
from service.bounds.replay import WARM, Memory, RecordCache, Repeat

MOST = 4
"""Shapes of rows that are kept."""


@dataclass(eq=False)
class Record:
    """A method on one shape of boxes, with the rows of a plan; ``repeat`` makes what repeats a body in ``memory``."""

    network: Network
    passes: Passes
    options: BoundOptions
    box: Interval
    plan: Plan
    repeat: InitVar[Callable[[Memory], Repeat]]
    memory: InitVar[Memory]
    _rows: RecordCache[torch.Size, _RecordedRows] = field(init=False)
    _layers: Repeat = field(init=False)

    def __post_init__(self, repeat: Callable[[Memory], Repeat], memory: Memory) -> None:
        self.options = replace(self.options, progress=None)  # a replay skips this
        self._rows = RecordCache(repeat, MOST, memory)
        self._layers = self._rows.repeater()
        self._layers.run(self._bound, WARM + 1)

    def take(self, box: Interval) -> None:
        """Bound another one of the same shape."""
        overwrite(box, self.box)
        self._layers.run(self._bound, 1)

    def _bound(self) -> None:
        choose = Planned(self.plan)
        # A box of its own each time: it keeps what it has computed once.
        self.analysis = self.passes.bounded(self.network, replace(self.box), self.options, choose)
        self.missing = choose.missing

    @property
    def suffices(self) -> bool:
        """Return whether all rows that matter were among the planned ones; waits for the device where they may not
        be.
        """
        return self.missing is None or int(self.missing) <= 0

    def lower_bounds(self, rows: Tensor) -> Tensor:
        """Return lower bounds of rows in the last box taken."""
        asked = self._rows.take(rows.shape)
        if asked is None:
            asked = _RecordedRows(rows.clone(), self._rows.repeater())
        asked.rows.copy_(rows)
        asked.repeat.run(partial(self._answer, asked), WARM + 1 if asked.found is None else 1)
        self._rows.keep(rows.shape, asked)
        assert asked.found is not None
        return asked.found.clone()

    def _answer(self, asked: _RecordedRows) -> None:
        asked.found = _anew(self.analysis).lower_bounds(asked.rows)


@dataclass(eq=False)
class _RecordedRows:
    """Rows of one shape, what repeats the pass through them, and their bounds."""

    rows: Tensor
    repeat: Repeat
    found: Tensor | None = None


def _anew(analysis: LinearAnalysis) -> LinearAnalysis:
    """Return the analysis with intervals that have computed nothing: what they keep would not be computed again in a
    replay.
    """
    intervals = {name: replace(each) for name, each in analysis.backward.intervals.items()}
    return replace(analysis, backward=replace(analysis.backward, intervals=intervals))
