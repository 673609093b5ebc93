"""Planes below rows of the output, for batches of boxes.

A small network is folded and bounded backward, box by box. A large one is bounded forward, as affine forms of
its few inputs, with backward rows only for entries that stay open. Weaker methods, and networks that are
divided over ranks, use the usual bounds. Rigorous planes are computed separately, box by box.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from service.bounds.affine_forward import affine_forward
from service.bounds.flat import by_row
from service.bounds.folded import FoldedNetwork, fold
from service.bounds.interval import Interval
from service.bounds.linear.plain import Pass
from service.bounds.methods import CROWN, IntermediateBounds, Method
from service.bounds.methods.base import LinearAnalysis, PlaneAnalysis
from service.bounds.network import Network
from service.bounds.options import BoundOptions, affordable
from service.bounds.planes import BoxPlanes, Known, Planes, minimum
from service.bounds.stages import Staged
from service.verification.engine import BoundingEngine

FLOATS_PER_PAIR, FLOATS_PER_SLOPE, FLOATS_PER_FORM, FLOATS_PER_BOUND = 10, 4, 8, 8
"""The numbers that the code below holds at a time: for each entry of a pair of rows, for each slope of an entry, for
each entry of a value that is propagated forward, and for the bounds and the relaxation of each entry. They are
counted from the code, and are not settings of the search.
"""


class InputBounds(Protocol):
    """``box`` is ``(batch, features)``, ``rows`` ``(rows, outputs)``; ``known`` holds in the boxes."""

    @property
    def entries(self) -> int:
        """Return a measure of the work per box."""

    @property
    def floats(self) -> int:
        """Return the most numbers that a box needs, besides the rows of a pass, which are processed in parts."""

    def planes(self, box: Interval, known: Known, rows: Tensor) -> Planes:
        """Return planes below the rows in each box."""


InputBoundsFactory = Callable[[], InputBounds | None]
"""Makes input bounds, which itself takes memory; ``None`` if they do not apply."""


def factories_of(
    engine: BoundingEngine, method: Method, whole: Interval, options: BoundOptions
) -> list[InputBoundsFactory]:
    """Return bounds for boxes within ``whole`` ``(1, features)``, in its dtype and on its device: the best
    first, then those that take less memory.

    Boxes are many and small, so their intermediate bounds are never optimised.
    """
    method = method if method.intermediate is IntermediateBounds.INTERVALS else CROWN
    plain = _plain_factories(engine, method, whole, options)

    def rigorous(factory: InputBoundsFactory) -> InputBounds | None:
        found = factory()
        analyse = partial(engine.rigorous_analysis, method, options=options)
        return None if found is None else _RigorousInputBounds(analyse, found, engine.entries * engine.widest)

    return engine.arithmetic.certifying(lambda: [partial(rigorous, factory) for factory in plain]) or plain


def _plain_factories(
    engine: BoundingEngine, method: Method, whole: Interval, options: BoundOptions
) -> list[InputBoundsFactory]:
    if (stages := engine.stages) is not None:
        return [lambda: _StagedInputBounds(stages, method, options)]
    network = engine.network
    is_weak, is_divided = method.intermediate is IntermediateBounds.INTERVALS, network.tp_group.axis.size > 1
    analysed = _PassInputBounds(network, partial(_by_method, method), options, 64, 1)
    if is_weak or is_divided:
        return [lambda: analysed]
    free = int((whole.width > 0).sum())

    def fold_network() -> _FoldedInputBounds | None:
        found = fold(network, whole.lower)
        return None if found is None else _FoldedInputBounds(found)

    def propagate_forms() -> _PassInputBounds:
        return _PassInputBounds(network, affine_forward, affordable(network, whole, options), 4 + 2 * free, 1 + free)

    return [fold_network, propagate_forms, lambda: analysed]


@dataclass(frozen=True, eq=False)
class _FoldedInputBounds:
    folded: FoldedNetwork

    @property
    def entries(self) -> int:
        """Count pairs of rows for a third of the entries, each as wide as the widest operator."""
        sizes = [node.size for node in self.folded.nodes]
        return max(1, sum(sizes) * max(sizes, default=1))

    @property
    def floats(self) -> int:
        """Count a box's numbers if every entry of the widest operators gets a pair of rows, and all have slopes."""
        sizes = [node.size for node in self.folded.nodes]
        features = self.folded.network.graph.input.size
        widest = max(sizes, default=1)
        rows = FLOATS_PER_PAIR * widest * max(widest, features)
        return rows + (FLOATS_PER_SLOPE * features + FLOATS_PER_BOUND) * sum(sizes)

    def planes(self, box: Interval, known: Known, rows: Tensor) -> Planes:
        return BoxPlanes(self.folded, box, known).planes(rows)


@dataclass(frozen=True, eq=False)
class _PassInputBounds:
    """Bounds by one pass for each box, without the bounds of values in a larger one.

    ``copies`` of the widest value measure the work of a box; ``forms`` counts the forms propagated forward at a time.
    """

    network: Network
    make: Callable[[Network, Interval, BoundOptions], Pass]
    options: BoundOptions
    copies: int
    forms: int

    @property
    def entries(self) -> int:
        return self.network.widest * self.copies

    @property
    def floats(self) -> int:
        sizes = [node.size for node in self.network.graph.nodes]
        return self.forms * FLOATS_PER_FORM * self.network.widest + FLOATS_PER_BOUND * sum(sizes)

    def planes(self, box: Interval, known: Known, rows: Tensor) -> Planes:
        graph = self.network.graph
        shaped = box.map(lambda end: end.reshape(-1, *graph.input.shape))
        backward = self.make(self.network, shaped, self.options)
        rows, nothing = rows.reshape(1, -1, *graph.output.shape), box.lower.new_zeros(1, 1, box.lower.shape[1])
        # The least value over a box is linear in the box's centre, with the plane's slope.
        with torch.enable_grad():
            ends = shaped.map(lambda end: end.detach().requires_grad_())
            intervals = {**backward.intervals, graph.input.name: ends}
            # All rows on every tensor-parallel rank: then no gradient has to go to another.
            least = replace(backward, intervals=intervals, divided=False).lower_bounds(graph.output.name, rows)
            slopes = [_slope(each, ends) for each in least.unbind(dim=1)]
        tp_group = self.network.tp_group
        coefficients = tp_group.agree(by_row(torch.stack(slopes, dim=1)))
        least = tp_group.agree(least.detach())
        return Planes(coefficients, least - minimum(box, coefficients, torch.zeros_like(least)), {}, nothing)


@dataclass(frozen=True, eq=False)
class _RigorousInputBounds:
    """Planes that are lower bounds in real arithmetic; ``plain`` ones give the cost of each input's width.

    ``largest`` is the most entries of a pass's rows, with one row for each value of the network.
    """

    analyse: Callable[[Interval], PlaneAnalysis]
    plain: InputBounds
    largest: int

    @property
    def entries(self) -> int:
        return max(self.plain.entries, 8 * self.largest)

    @property
    def floats(self) -> int:
        return max(self.plain.floats, 8 * self.largest)

    def planes(self, box: Interval, known: Known, rows: Tensor) -> Planes:
        coefficients, bias = self.analyse(box).planes(rows.unsqueeze(0))
        plain = self.plain.planes(box, {}, rows)
        return replace(plain, coefficients=coefficients, bias=bias, known={})


def _by_method(method: Method, network: Network, box: Interval, options: BoundOptions) -> Pass:
    analysis = method(network, box, options)
    assert isinstance(analysis, LinearAnalysis)
    return analysis.backward


def _slope(least: Tensor, ends: Interval) -> Tensor:
    """Return the slope, zero if the bound comes from intervals of hidden values and ignores the box."""
    if not least.requires_grad:
        return torch.zeros_like(ends.lower)
    lower, upper = torch.autograd.grad(
        least.sum(), (ends.lower, ends.upper), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return lower + upper


STAGE_COPIES = 64
"""Copies of the widest value that a box needs in a stage; counted like the numbers above."""


@dataclass(frozen=True, eq=False)
class _StagedInputBounds:
    """A :class:`~service.verification.bab.inputs.input_bounds.InputBounds` that all stages call."""

    staged: Staged
    method: Method
    options: BoundOptions

    @property
    def entries(self) -> int:
        return self.staged.widest * STAGE_COPIES

    @property
    def floats(self) -> int:
        return self.staged.widest * STAGE_COPIES + self.staged.entries * FLOATS_PER_BOUND

    @torch.no_grad()
    def planes(self, box: Interval, known: Known, rows: Tensor) -> Planes:
        line, nothing = self.staged.line, box.lower.new_zeros(1, 1, box.lower.shape[1])
        box_with_record = _RecordingBox(box.lower, box.upper, [])
        analysis = self.staged.method(self.method)(self.staged.network, box_with_record, self.options)
        box_with_record.arrived.clear()
        least = self.staged.network.tp_group.agree(analysis.lower_bounds(rows.unsqueeze(0)))
        coefficients = line.of_first(self._slopes(box_with_record.arrived, least, nothing) if line.is_first else None)
        return Planes(coefficients, least - minimum(box, coefficients, torch.zeros_like(least)), {}, nothing)

    def _slopes(self, arrived: list[Tensor], least: Tensor, nothing: Tensor) -> Tensor:
        """Return all rows' coefficients ``(batch, rows, features)`` at the input; zeros if their order is not known."""
        tp_group, (batch, rows) = self.staged.network.tp_group, least.shape
        flat = [tp_group.gather(by_row(each).expand(batch, -1, -1), 1) for each in arrived]
        # Each tensor-parallel rank's share of the rows is padded to the same number, part by part.
        if len(flat) == 1 or (flat and tp_group.axis.size == 1):
            return tp_group.agree(torch.cat(flat, dim=1)[:, :rows])
        return nothing.expand(batch, rows, -1)


@dataclass(frozen=True, eq=False)
class _RecordingBox(Interval):
    """Records the coefficients ``(batch or 1, rows, *shape)`` whose minimum is requested."""

    arrived: list[Tensor]

    def arranged(self, function: Callable[[Tensor], Tensor]) -> _RecordingBox:
        return _RecordingBox(function(self.lower), function(self.upper), self.arrived)

    def least(self, coefficients: Tensor) -> Tensor:
        self.arrived.append(coefficients)
        return super().least(coefficients)
