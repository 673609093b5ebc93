"""Methods over pipeline stages, whose backward passes continue in previous stages.

A stage asks the previous stage for bounds of rows of its input, which may ask in turn. When relaxations are
optimised, each stage keeps the slopes of its own operators: rows go up the line and bounds come back, then the
bounds' gradient goes up and the rows' comes back, and every stage updates its own slopes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from service.bounds.capture import capture
from service.bounds.graph import Graph, UnsupportedModelError
from service.bounds.interval import Interval
from service.bounds.linear.plain import Pass
from service.bounds.linear.rigorous import RigorousPass
from service.bounds.methods import Analysis, Bounder
from service.bounds.methods.alpha import OptimisedAnalysis
from service.bounds.methods.base import LinearAnalysis, elements_of_a_row
from service.bounds.network import Network, OptimisedBefore
from service.bounds.operators import check
from service.bounds.optimise import Ascent, Families, SlopeOptimiser
from service.bounds.options import BoundOptions
from service.bounds.placement import Placement, check_constants, place, place_part
from service.bounds.rank_group import RankGroup
from service.bounds.rigorous import RigorousAnalysis
from service.bounds.rigorous.method import plain_convolutions, through
from service.bounds.stages.cuts import cut_graph
from service.bounds.stages.link import StageLink
from service.parallel.mesh import Axis

Crossing = LinearAnalysis | OptimisedAnalysis | RigorousAnalysis
"""An analysis that continues in previous stages."""


@dataclass(frozen=True, eq=False)
class _Boundary(Interval):
    """Bounds of a stage's input: no propagation from them is exact."""

    exact_layers: ClassVar[int] = -1


class _StageRequest(IntEnum):
    """A request of a stage to the one before it. Rows are its own, or common to the tensor-parallel ranks."""

    COMMON_ROWS = 0
    OWN_ROWS = 1
    OPTIMISE = 2
    """Optimise relaxations from now on, beginning with those of a plain pass."""
    RESTART = 3
    COMMON_ROWS_OPTIMISED = 4
    OWN_ROWS_OPTIMISED = 5
    GRADIENT = 6
    """The gradient of the last bounds; the answer is that of their rows."""
    NOTHING = 7
    """There are no more requests."""
    COMMON_ROWS_CHOSEN = 8
    OWN_ROWS_CHOSEN = 9
    """Rigorously, through the choice of the last ascent."""
    COMMON_PLANES = 10
    OWN_PLANES = 11
    """Rigorous planes below the rows; coefficients and constants come in one tensor."""


def _tell(line: StageLink, asked: _StageRequest) -> None:
    line.to_previous(torch.tensor([asked]))


@dataclass(eq=False)
class _Service:
    """This stage's answers to the next one, by passes from ``start``, its output."""

    line: StageLink
    backward: Pass
    start: str
    ascent: Ascent
    _optimiser: SlopeOptimiser | None = None
    _last: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def run(self) -> None:
        """Answer until the last request."""
        while (asked := _StageRequest(int(self.line.from_next()))) is not _StageRequest.NOTHING:
            self._answer(asked)

    def _answer(self, asked: _StageRequest) -> None:
        if asked is _StageRequest.OPTIMISE:
            self._last = None
            self._optimiser = SlopeOptimiser(Families(self.backward), self.start, self.ascent)
        elif asked is _StageRequest.RESTART:
            self._current_optimiser.restart()
        elif asked is _StageRequest.GRADIENT:
            self.line.to_next(self._stepped(self.line.from_next()))
        elif asked in (_StageRequest.COMMON_ROWS_OPTIMISED, _StageRequest.OWN_ROWS_OPTIMISED):
            own = asked is _StageRequest.OWN_ROWS_OPTIMISED
            self.line.to_next(self._optimised_bounds(self.line.from_next(), own))
        else:
            self._optimiser = self._last = None
            self.line.to_next(self._bounds(self.line.from_next(), asked is _StageRequest.OWN_ROWS))

    def _bounds(self, rows: Tensor, own: bool) -> Tensor:
        return self.backward.lower_bounds(self.start, rows, own)

    @property
    def _current_optimiser(self) -> SlopeOptimiser:
        assert self._optimiser is not None, "the next stage goes on with an ascent that it did not begin"
        return self._optimiser

    def _optimised_bounds(self, rows: Tensor, own: bool) -> Tensor:
        self._last = None
        with torch.enable_grad():
            bounds = self._current_optimiser.backward.lower_bounds(self.start, rows.requires_grad_(), own)
        self._last = rows, bounds
        return bounds

    def _stepped(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the last rows, after a step of this stage's slopes."""
        assert self._last is not None, "the next stage has a gradient of bounds that it did not ask for"
        rows, bounds = self._last
        with torch.enable_grad():
            self._current_optimiser.step(bounds, gradient, [rows])
        assert rows.grad is not None
        self._last = None
        return rows.grad


@dataclass(eq=False, kw_only=True)
class _RigorousService(_Service):
    """Answers that hold in real arithmetic; ``backward`` is optimised before."""

    rigorous: RigorousPass

    def run(self) -> None:
        with torch.no_grad(), plain_convolutions():
            super().run()

    def _answer(self, asked: _StageRequest) -> None:
        if asked in (_StageRequest.COMMON_ROWS_CHOSEN, _StageRequest.OWN_ROWS_CHOSEN):
            rows, own = self.line.from_next(), asked is _StageRequest.OWN_ROWS_CHOSEN
            self.line.to_next(through(self.rigorous, self._current_optimiser).lower_bounds(self.start, rows, own=own))
        elif asked in (_StageRequest.COMMON_PLANES, _StageRequest.OWN_PLANES):
            slopes, constants = self.rigorous.planes(
                self.start, self.line.from_next(), asked is _StageRequest.OWN_PLANES
            )
            self.line.to_next(torch.cat([slopes, constants.unsqueeze(2)], dim=2))
        else:
            super()._answer(asked)

    def _bounds(self, rows: Tensor, own: bool) -> Tensor:
        return self.rigorous.lower_bounds(self.start, rows, own=own)


@dataclass(frozen=True, eq=False)
class Staged:
    """This rank's stage of a network. ``outputs`` counts the outputs of the whole network, ``entries`` the
    entries of all its values, and ``widest`` those of the largest value; they are the same on all stages.
    """

    line: StageLink
    network: Network
    outputs: int
    entries: int
    widest: int

    def method(self, method: Bounder) -> Bounder:
        """Return ``method`` for the whole network, called by all stages; the analysis answers for the last stage's
        output.

        The box is the first stage's. Boxes and rows may also come flattened.
        """

        def bounded(network: Network, box: Interval, options: BoundOptions) -> Analysis:
            line, options = self.line, self._affordable(options)
            analysis = method(self.network, self._entering(box), options)
            assert isinstance(analysis, Crossing), f"{method} does not cross stages"
            if not line.is_last:
                ends = analysis.backward.intervals[self.network.graph.output.name]
                line.to_next(torch.stack([ends.lower, ends.upper]))
            self._answer(analysis, lambda: box.lower.new_zeros(1))
            return StagedAnalysis(self, analysis)

        return bounded

    def _affordable(self, options: BoundOptions) -> BoundOptions:
        """Return options for the stage with the least memory, since a stage's rows go through all previous stages."""

        def least(count: int) -> int:
            of_stages = int(self.line.joined(torch.tensor([count])).min())
            return self.network.tp_group.least(of_stages, self.line.device)

        return options.within(self.line.device, least)

    def _entering(self, box: Interval) -> Interval:
        if not self.line.is_first:
            return _Boundary(*self.line.from_previous().unbind())
        return box.arranged(lambda end: end.reshape(len(end), *self.network.graph.input.shape))

    def _service(self, analysis: Crossing) -> _Service:
        line, start, ascent = self.line, self.network.graph.output.name, analysis.options.ascent
        if isinstance(analysis, RigorousAnalysis):
            return _RigorousService(line, analysis.backward.plain, start, ascent, rigorous=analysis.backward)
        return _Service(line, analysis.backward, start, ascent)

    def _answer(self, analysis: Crossing, find: Callable[[], Tensor]) -> Tensor:
        """Return the last stage's result, on every stage; the others serve it and each other meanwhile."""
        line = self.line
        if line.is_last:
            found = find()
        else:
            self._service(analysis).run()
            found = line.from_next()
        if not line.is_first:
            _tell(line, _StageRequest.NOTHING)
            line.to_previous(found)
        return found


@dataclass(frozen=True, eq=False)
class StagedAnalysis:
    """An :class:`~service.bounds.methods.Analysis` of the whole network; this rank has its stage's part."""

    staged: Staged
    analysis: Crossing

    @property
    def entering(self) -> Interval:
        """Return the bounds of this rank's stage's input."""
        return self.analysis.backward.intervals[self.staged.network.graph.input.name]

    @property
    def inputs(self) -> Mapping[str, tuple[Interval, ...]]:
        """Return the inputs of this rank's stage."""
        return self.analysis.inputs

    def lower_bounds(self, rows: Tensor) -> Tensor:
        shape = (*rows.shape[:2], *self.staged.network.graph.output.shape)
        return self.staged._answer(self.analysis, lambda: self.analysis.lower_bounds(rows.reshape(shape)))

    def planes(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return planes of a rigorous analysis, as :meth:`~service.bounds.rigorous.RigorousAnalysis.planes`."""
        analysis = self.analysis
        assert isinstance(analysis, RigorousAnalysis)

        def find() -> Tensor:
            slopes, constants = analysis.planes(rows)
            return torch.cat([slopes, constants.unsqueeze(2)], dim=2)

        found = self.staged._answer(analysis, find)
        return found[..., :-1], found[..., -1]


def prepare_stages(module: nn.Module, input_shape: Sequence[int], axis: Axis, line: StageLink) -> Staged:
    """Prepare a model of which ``module`` is this rank's stage, like :func:`~service.bounds.network.prepare`.

    ``input_shape`` is that of the model; the ranks of ``axis`` have the stage together. Every rank calls it.
    """
    shape, entering = tuple(input_shape), Placement.REPLICATED
    if not line.is_first:
        is_own, *arrived = line.from_previous().tolist()
        shape, entering = tuple(arrived), Placement.OWN if is_own else Placement.REPLICATED
    graph = capture(module, shape)
    check(graph)
    placements = place_part(graph, entering)
    leaving = placements[graph.output.name] is Placement.OWN
    if not line.is_last:
        line.to_next(torch.tensor([int(leaving), *graph.output.shape]))
    elif leaving:
        raise UnsupportedModelError("the model's output is divided over the tensor-parallel ranks")
    return _stage_of(graph, placements, axis, line)


def divide_into_stages(graph: Graph, axis: Axis, line: StageLink) -> Staged:
    """Prepare a whole graph; this rank keeps its stage, on its device.

    Every rank calls it. Ranks that share a model over ``axis`` each have their own part of the graph.
    """
    check(graph)
    placements = place(graph)
    own = cut_graph(graph, placements, line.size)[line.rank].to(line.device)
    # All values that cross a cut together have the placement of the first of them.
    entering = next(placements[node.name] for node in own.nodes if node.name in placements)
    return _stage_of(own, place_part(own, entering), axis, line)


@dataclass(frozen=True, eq=False)
class _StagesBefore:
    """A :class:`~service.bounds.network.Before` that is asked over the line."""

    line: StageLink
    entries: int
    features: int

    def lower_bounds(self, rows: Tensor, own: bool) -> Tensor:
        return _ask_for(self.line, _StageRequest.OWN_ROWS if own else _StageRequest.COMMON_ROWS, rows)

    def optimised(self, anchor: Tensor) -> OptimisedBefore:
        _tell(self.line, _StageRequest.OPTIMISE)
        return _OptimisedStagesBefore(self.line, anchor)

    def chosen(self, rows: Tensor, own: bool) -> Tensor:
        return _ask_for(self.line, _StageRequest.OWN_ROWS_CHOSEN if own else _StageRequest.COMMON_ROWS_CHOSEN, rows)

    def planes(self, rows: Tensor, own: bool) -> tuple[Tensor, Tensor]:
        found = _ask_for(self.line, _StageRequest.OWN_PLANES if own else _StageRequest.COMMON_PLANES, rows)
        return found[..., :-1], found[..., -1]


@dataclass(frozen=True, eq=False)
class _OptimisedStagesBefore:
    line: StageLink
    anchor: Tensor

    def lower_bounds(self, rows: Tensor, own: bool) -> Tensor:
        found: Tensor = _Bounds.apply(rows, self.anchor, self.line, own)  # type: ignore[no-untyped-call]
        return found

    def restart(self) -> None:
        _tell(self.line, _StageRequest.RESTART)


class _Bounds(torch.autograd.Function):
    """Bounds of rows by previous stages. ``anchor`` takes a gradient if rows do not, since the stages wait."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor, line: StageLink, own: bool) -> Tensor:
        ctx.line = line
        return _ask_for(line, _StageRequest.OWN_ROWS_OPTIMISED if own else _StageRequest.COMMON_ROWS_OPTIMISED, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return _ask_for(ctx.line, _StageRequest.GRADIENT, gradient), gradient.new_zeros(()), None, None


def _ask_for(line: StageLink, asked: _StageRequest, tensor: Tensor) -> Tensor:
    _tell(line, asked)
    line.to_previous(tensor)
    return line.from_previous()


def _stage_of(graph: Graph, placements: Mapping[str, Placement], axis: Axis, line: StageLink) -> Staged:
    """Return the stage of a checked graph; every rank calls it."""
    tp_group = RankGroup(axis)
    check_constants(graph, placements, tp_group)
    before = None if line.is_first else _StagesBefore(line, *line.from_previous().tolist())
    network = Network(graph, placements, tp_group, graph.by_name, before)
    if not line.is_last:
        features = graph.input.size if before is None else before.features
        line.to_next(torch.tensor([elements_of_a_row(network, graph.output.name, 1), features]))
    sizes = [node.size * network.shares(node.name) for node in graph.nodes]
    each = line.joined(torch.tensor([[sum(sizes), max(sizes)]]))
    outputs = int(line.of_last(torch.tensor([graph.output.size])))
    return Staged(line, network, outputs, int(each[:, 0].sum()), int(each[:, 1].max()))
