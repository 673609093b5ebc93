"""A method recorded on one shape of boxes, with the rows of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from service.bounds.contents import overwrite
from service.bounds.interval import Interval
from service.bounds.methods.base import LinearAnalysis
from service.bounds.methods.passes import Passes
from service.bounds.methods.row_plan import Plan, Planned
from service.bounds.network import Network
from service.bounds.options import BoundOptions
from service.bounds.replay import WARM, Repeat

MOST = 4
"""Shapes of rows that are kept."""


@dataclass(eq=False)
class Record:
    """A method on one shape of boxes, with the rows of a plan."""

    network: Network
    passes: Passes
    options: BoundOptions
    box: Interval
    plan: Plan
    repeat: Callable[[], Repeat]
    _layers: Repeat = field(init=False)
    _rows: dict[torch.Size, _RecordedRows] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.options = replace(self.options, progress=None)  # a replay does not come by here
        self._layers = self.repeat()
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
        asked = self._rows.pop(rows.shape, None)
        if asked is None:
            while len(self._rows) >= MOST:
                del self._rows[next(iter(self._rows))]
            asked = _RecordedRows(rows.clone(), self.repeat())
        asked.rows.copy_(rows)
        asked.repeat.run(partial(self._answer, asked), WARM + 1 if asked.found is None else 1)
        self._rows[rows.shape] = asked
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
