"""Methods over pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from service.bounds.capture import capture
from service.bounds.graph import Graph, UnsupportedModelError
from service.bounds.interval import Interval
from service.bounds.methods import Analysis, Bounder
from service.bounds.methods.alpha import OptimisedAnalysis
from service.bounds.methods.base import LinearAnalysis, elements_of_a_row
from service.bounds.network import Network
from service.bounds.operators import check
from service.bounds.options import BoundOptions
from service.bounds.placement import Placement, check_constants, place, place_part
from service.bounds.rank_group import RankGroup
from service.bounds.rigorous import RigorousAnalysis
from service.bounds.stages.cuts import cut_graph
from service.bounds.stages.link import StageLink
from service.bounds.stages.passes import RigorousService, Service, StageRequest, StagesBefore, tell
from service.parallel.mesh import Axis

Crossing = LinearAnalysis | OptimisedAnalysis | RigorousAnalysis
"""An analysis that goes on in the stages before."""


@dataclass(frozen=True, eq=False)
class _Boundary(Interval):
    """Bounds of what enters a stage: no propagation from them is exact."""

    exact_layers: ClassVar[int] = -1


@dataclass(frozen=True, eq=False)
class Staged:
    """This rank's stage of a network. ``outputs`` counts those of the whole, ``entries`` those of all its values, and
    ``widest`` those of the largest, which are the same numbers on all stages.
    """

    line: StageLink
    network: Network
    outputs: int
    entries: int
    widest: int

    def method(self, method: Bounder) -> Bounder:
        """Return ``method`` for the whole network, called by all stages; the analysis answers for the last one's
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
        """Return options for the stage with the least memory: as many rows as one sends go through those before
        it.
        """

        def least(count: int) -> int:
            of_stages = int(self.line.joined(torch.tensor([count])).min())
            return self.network.tp_group.least(of_stages, self.line.device)

        return options.within(self.line.device, least)

    def _entering(self, box: Interval) -> Interval:
        if not self.line.is_first:
            return _Boundary(*self.line.from_previous().unbind())
        return box.arranged(lambda end: end.reshape(len(end), *self.network.graph.input.shape))

    def _service(self, analysis: Crossing) -> Service:
        line, start, ascent = self.line, self.network.graph.output.name, analysis.options.ascent
        if isinstance(analysis, RigorousAnalysis):
            return RigorousService(line, analysis.backward.plain, start, ascent, rigorous=analysis.backward)
        return Service(line, analysis.backward, start, ascent)

    def _answer(self, analysis: Crossing, find: Callable[[], Tensor]) -> Tensor:
        """Return what the last stage finds, on every stage; the others serve it and each other meanwhile."""
        line = self.line
        if line.is_last:
            found = find()
        else:
            self._service(analysis).run()
            found = line.from_next()
        if not line.is_first:
            tell(line, StageRequest.NOTHING)
            line.to_previous(found)
        return found


@dataclass(frozen=True, eq=False)
class StagedAnalysis:
    """An :class:`~service.bounds.methods.Analysis` of the whole network, of which this rank has its stage's part."""

    staged: Staged
    analysis: Crossing

    @property
    def entering(self) -> Interval:
        """Return bounds of what enters this rank's stage."""
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
    """Prepare a whole graph, of which this rank keeps its stage, on its device. Every rank calls it.

    Of ranks that share a model over ``axis`` each has its own part of the graph.
    """
    check(graph)
    placements = place(graph)
    own = cut_graph(graph, placements, line.size)[line.rank].to(line.device)
    # All values that cross a cut together have the placement of the first of them.
    entering = next(placements[node.name] for node in own.nodes if node.name in placements)
    return _stage_of(own, place_part(own, entering), axis, line)


def _stage_of(graph: Graph, placements: Mapping[str, Placement], axis: Axis, line: StageLink) -> Staged:
    """Return the stage of a checked graph; every rank calls it."""
    tp_group = RankGroup(axis)
    check_constants(graph, placements, tp_group)
    before = None if line.is_first else StagesBefore(line, *line.from_previous().tolist())
    network = Network(graph, placements, tp_group, graph.by_name, before)
    if not line.is_last:
        features = graph.input.size if before is None else before.features
        line.to_next(torch.tensor([elements_of_a_row(network, graph.output.name, 1), features]))
    sizes = [node.size * network.shares(node.name) for node in graph.nodes]
    each = line.joined(torch.tensor([[sum(sizes), max(sizes)]]))
    outputs = int(line.of_last(torch.tensor([graph.output.size])))
    return Staged(line, network, outputs, int(each[:, 0].sum()), int(each[:, 1].max()))
