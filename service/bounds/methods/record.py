"""Records a method on one shape of boxes, with the rows of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from service.bounds.buffers import overwrite
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.plain import Pass
from service.bounds.methods.base import LinearAnalysis, elements_of_a_row
from service.bounds.methods.layers import numbers, wanted_entries, wanted_rows
from service.bounds.methods.passes import Passes
from service.bounds.network import Network
from service.bounds.options import BoundOptions
from service.bounds.replay import WARM, Memory, RecordCache, Repeat

CHEAP = 2**22
"""Coefficients of all of a value's rows below which choosing some rows does not pay."""
STEPS, FEWEST = 16, 8
"""Steps of row counts below a power of two, and the fewest rows of a step."""


@dataclass(frozen=True)
class RowCount:
    """The number of rows of a value: each instance's ``own``, or the same entries for all."""

    count: int
    own: bool


Plan = Mapping[str, RowCount]
"""Row counts by the value's name."""


@dataclass(eq=False)
class Noted:
    """The result of :func:`wanted_rows`, and the number of rows."""

    found: dict[str, RowCount] = field(default_factory=dict)

    def __call__(self, backward: Pass, node: Node, index_of_input: int) -> tuple[Tensor, Tensor]:
        wanted, index = wanted_rows(backward, node, index_of_input)
        self.found[node.inputs[index_of_input]] = RowCount(index.shape[1], own=len(index) > 1)
        return wanted, index


@dataclass(eq=False)
class _Planned:
    """Choose the planned number of rows, whatever the boxes are, without reading results from the device.

    ``missing`` counts entries that matter but get no row: their bounds stay as they were, which is sound. A positive
    number means that the plan is too small.
    """

    plan: Plan
    missing: Tensor | None = None

    def __call__(self, backward: Pass, node: Node, index_of_input: int) -> tuple[Tensor, Tensor]:
        wanted, rows = wanted_entries(backward, node, index_of_input), self.plan[node.inputs[index_of_input]]
        size = wanted.shape[1]
        if rows.count >= size:
            return wanted, torch.arange(size, device=wanted.device)[None]
        chosen = wanted if rows.own else wanted.any(dim=0, keepdim=True)
        missing = chosen.sum(dim=1).amax() - rows.count
        self.missing = missing if self.missing is None else torch.maximum(self.missing, missing)
        return wanted, numbers(chosen, rows.count)


def planned(network: Network, batch: int, found: Plan, earlier: Plan) -> Plan:
    """Return a plan for a few more rows than were needed or planned before; for all rows if that is cheap."""
    return {name: _planned(network, batch, name, rows, earlier.get(name)) for name, rows in found.items()}


def _planned(network: Network, batch: int, name: str, found: RowCount, earlier: RowCount | None) -> RowCount:
    size = network.nodes[name].size
    if 2 * size * elements_of_a_row(network, name, batch) <= CHEAP:
        return RowCount(size, own=False)
    step = max(FEWEST, (1 << (found.count - 1).bit_length()) // STEPS)
    count = -(-(found.count + step // 2) // step) * step
    if earlier is not None and earlier.own == found.own:
        count = max(count, earlier.count)
    return RowCount(count, found.own) if count < size else RowCount(size, own=False)


MOST = 4
"""Shapes of rows that are kept."""


@dataclass(eq=False)
class Record:
    """A method on one shape of boxes, with the rows of a plan; ``repeat`` makes a repeatable body in ``memory``."""

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
        """Bound another box of the same shape."""
        overwrite(box, self.box)
        self._layers.run(self._bound, 1)

    def _bound(self) -> None:
        choose = _Planned(self.plan)
        # A new box each time, since a box caches its results.
        self.analysis = self.passes.bounded(self.network, replace(self.box), self.options, choose)
        self.missing = choose.missing

    @property
    def suffices(self) -> bool:
        """Return whether all rows that matter were planned; waits for the device if that is uncertain."""
        return self.missing is None or int(self.missing) <= 0

    def lower_bounds(self, rows: Tensor) -> Tensor:
        """Return lower bounds of rows in the last box."""
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
    """Rows of one shape, the repeatable pass through them, and their bounds."""

    rows: Tensor
    repeat: Repeat
    found: Tensor | None = None


def _anew(analysis: LinearAnalysis) -> LinearAnalysis:
    """Return the analysis with intervals that have cached nothing: a replay would not compute cached values again."""
    intervals = {name: replace(each) for name, each in analysis.backward.intervals.items()}
    return replace(analysis, backward=replace(analysis.backward, intervals=intervals))
