"""Bounds of a network that is cut into pipeline stages.

Intervals go down the line with the values; coefficients go up against it, stage by stage to the input, and bounds
come back. A stage's relaxations and intervals stay with it, so a backward pass is one walk in several places: while
a stage bounds its layers, those before it serve its passes, and those behind it wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from service.bounds.backward import Pass
from service.bounds.capture import capture
from service.bounds.exchange import Exchange
from service.bounds.graph import UnsupportedModelError
from service.bounds.interval import Interval
from service.bounds.methods.base import Analysis, Effort, LinearAnalysis, Method
from service.bounds.network import Network
from service.bounds.placement import Placement, check_constants, place_part
from service.bounds.rules import check
from service.parallel.mesh import Mesh
from service.parallel.pipeline.channels import connect
from service.parallel.pipeline.tags import Kind, Message
from service.parallel.pipeline.transport import Transport


class Line:
    """A rank's place among the stages of its pipeline, and its messages to its neighbours.

    Tensors of any shape and type; both sides must call for the same message. A message has left when ``to_…`` returns.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        """Every rank of the job makes one at the same point."""
        owners = tuple(range(mesh.pp.size))
        self.rank, self.size, self.device = mesh.pp.rank, mesh.pp.size, device
        self._transport = Transport(mesh.pp.rank, owners, connect(mesh, owners), device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Line:
        return self

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def to_next(self, tensor: Tensor) -> None:
        self._send(Message(self.rank, 0, Kind.ACTIVATION), tensor)

    def from_previous(self) -> Tensor:
        return self._receive(Message(self.rank - 1, 0, Kind.ACTIVATION))

    def to_previous(self, tensor: Tensor) -> None:
        self._send(Message(self.rank - 1, 0, Kind.GRADIENT), tensor)

    def from_next(self) -> Tensor:
        return self._receive(Message(self.rank, 0, Kind.GRADIENT))

    def of_last(self, tensor: Tensor | None) -> Tensor:
        """The last stage's tensor on every stage, each of which calls it; others' are not looked at."""
        if not self.is_last:
            tensor = self.from_next()
        assert tensor is not None
        tensor = tensor.to(self.device)
        if not self.is_first:
            self.to_previous(tensor)
        return tensor

    def joined(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The stages' tensors side by side, on every stage."""
        tensor = tensor.to(self.device)
        if not self.is_first:
            tensor = torch.cat([self.from_previous(), tensor], dim=dim)
        if not self.is_last:
            self.to_next(tensor)
        return self.of_last(tensor)

    def _send(self, message: Message, tensor: Tensor) -> None:
        self._transport.begin_unknown()
        self._transport.send(message, tensor.to(self.device))
        self._transport.finish()

    def _receive(self, message: Message) -> Tensor:
        self._transport.begin_unknown()
        return self._transport.wait(self._transport.receive(message))


class _Asked(IntEnum):
    """What a stage tells the one before it: bounds of rows, of its own or common, or that it needs no more."""

    COMMON_ROWS = 0
    OWN_ROWS = 1
    NOTHING = 2


@dataclass(frozen=True, eq=False)
class _StagesBefore:
    """A :class:`~service.bounds.network.Before` that is asked over the line."""

    line: Line

    def lower_bounds(self, rows: Tensor, own: bool) -> Tensor:
        self.line.to_previous(torch.tensor([_Asked.OWN_ROWS if own else _Asked.COMMON_ROWS]))
        self.line.to_previous(rows)
        return self.line.from_previous()


@dataclass(frozen=True, eq=False)
class Boundary(Interval):
    """Bounds of what enters a stage: no propagation from them is exact."""

    exact_layers: ClassVar[int] = -1


@dataclass(frozen=True, eq=False)
class Staged:
    """This rank's stage of a network. ``outputs`` counts those of the whole."""

    line: Line
    network: Network
    outputs: int

    def method(self, method: Method) -> Method:
        """``method`` for the whole network, called by all stages; the analysis answers for the last one's output.

        The box is the first stage's. Raises ``UnsupportedModelError`` for a method that is no plain backward pass.
        """

        def bounded(network: Network, box: Interval, effort: Effort) -> Analysis:
            line = self.line
            own_box = box if line.is_first else Boundary(*line.from_previous().unbind())
            analysis = method(self.network, own_box, effort)
            if not isinstance(analysis, LinearAnalysis):
                raise UnsupportedModelError(
                    "parallel.pp: optimised bounds do not cross pipeline stages; expected ibp, crown-ibp or crown"
                )
            if not line.is_last:
                ends = analysis.backward.intervals[self.network.graph.output.name]
                line.to_next(torch.stack([ends.lower, ends.upper]))
            self._answer(analysis.backward, lambda: box.lower.new_zeros(1))
            return _StagedAnalysis(self, analysis)

        return bounded

    def _answer(self, backward: Pass, find: Callable[[], Tensor]) -> Tensor:
        """What the last stage finds, on every stage; the others serve it and each other meanwhile."""
        line = self.line
        if line.is_last:
            found = find()
        else:
            while (asked := int(line.from_next())) != _Asked.NOTHING:
                rows = line.from_next()
                output = self.network.graph.output.name
                line.to_next(backward.lower_bounds(output, rows, own=asked == _Asked.OWN_ROWS))
            found = line.from_next()
        if not line.is_first:
            line.to_previous(torch.tensor([_Asked.NOTHING]))
            line.to_previous(found)
        return found


@dataclass(frozen=True, eq=False)
class _StagedAnalysis:
    staged: Staged
    analysis: LinearAnalysis

    @property
    def inputs(self) -> Mapping[str, tuple[Interval, ...]]:
        """Of this rank's stage."""
        return self.analysis.inputs

    def lower_bounds(self, rows: Tensor) -> Tensor:
        return self.staged._answer(self.analysis.backward, lambda: self.analysis.lower_bounds(rows))


def prepare_stages(module: nn.Module, input_shape: Sequence[int], mesh: Mesh, line: Line) -> Staged:
    """Like :func:`~service.bounds.network.prepare` for a model of which ``module`` is this rank's stage.

    ``input_shape`` is that of the model. Every rank calls it.
    """
    shape, entering = tuple(input_shape), Placement.REPLICATED
    if not line.is_first:
        is_own, *arrived = line.from_previous().tolist()
        shape, entering = tuple(arrived), Placement.OWN if is_own else Placement.REPLICATED
    graph = capture(module, shape)
    check(graph)
    placements, exchange = place_part(graph, entering), Exchange(mesh.tp)
    check_constants(graph, placements, exchange)
    leaving = placements[graph.output.name] is Placement.OWN
    if not line.is_last:
        line.to_next(torch.tensor([int(leaving), *graph.output.shape]))
    elif leaving:
        raise UnsupportedModelError("the model's output is divided over the tensor-parallel ranks")
    outputs = int(line.of_last(torch.tensor([graph.output.size])))
    network = Network(graph, placements, exchange, graph.by_name)
    return Staged(line, network if line.is_first else replace(network, before=_StagesBefore(line)), outputs)


class InStages(nn.Module):
    """The model of which each rank of ``line`` has a stage: inputs of the first, outputs of the last on every rank."""

    def __init__(self, stage: nn.Module, line: Line) -> None:
        super().__init__()
        self.stage, self.line = stage, line

    def forward(self, x: Tensor) -> Tensor:
        if not self.line.is_first:
            x = self.line.from_previous()
        y: Tensor = self.stage(x)
        if not self.line.is_last:
            self.line.to_next(y)
        return self.line.of_last(y)
