"""Bounds a search's domains through a model in pipeline stages.

Every stage has all domains, with the slopes of its own operators and the splits of its own values. Rows go
backward through the stages and bounds come back, then the gradients of both, in a step that all stages take
together. One stage makes each comparison and tells the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.linear.plain import Pass
from service.bounds.relaxation import Relaxed
from service.bounds.stages import Staged, StageLink
from service.verification.bab.activations.dual_objective import DomainBatch, DualObjective, SpecificationRows
from service.verification.bab.activations.neuron_index import LocalSplits, NeuronIndex, NeuronIndexing
from service.verification.engine import BoundingEngine


@dataclass(frozen=True, eq=False)
class _StagedNeuronIndex:
    """The neuron index of all stages: the numbers of one stage follow those of the stages before it.

    ``own`` numbers the ``count`` entries of this stage, from 0.
    """

    line: StageLink
    own: NeuronIndex
    offset: int
    count: int
    is_whole: bool = False

    @classmethod
    def of(cls, line: StageLink, own: NeuronIndex) -> _StagedNeuronIndex:
        counts = line.joined(torch.tensor([own.entries * own.tp_group.axis.size])).tolist()
        return cls(line, own, sum(counts[: line.rank]), counts[line.rank])

    def localise(self, number: Tensor, sign: Tensor) -> LocalSplits:
        local = number - self.offset
        here = (local >= 0) & (local < self.count)
        return self.own.localise(torch.where(here, local, 0), torch.where(here, sign, 0))

    def total(self, number: Tensor, values: Tensor) -> Tensor:
        local = number - self.offset
        here = (local >= 0) & (local < self.count)
        found = self.own.total(torch.where(here, local, 0), torch.where(here, values, 0))
        return self.line.joined(torch.where(here, found, 0).unsqueeze(0)).sum(dim=0)

    def everywhere(self, values: Tensor) -> Tensor:
        return self.line.joined(self.own.everywhere(values))

    def anywhere(self, flags: Tensor) -> Tensor:
        return self.line.joined(self.own.anywhere(flags).unsqueeze(0)).any(dim=0)

    def least(self, count: int) -> int:
        return int(self.line.joined(torch.tensor([self.own.least(count)])).min())

    def best(self, scores: Tensor, count: int, fields: Sequence[Tensor]) -> list[Tensor]:
        best, number, *found = self.own.best(scores, count, fields)
        # An entry's number is exact in float64, and so is everything else.
        everyone = self.line.joined(torch.stack([each.double() for each in (best, number + self.offset, *found)]), 2)
        chosen = everyone[0].topk(min(count, everyone.shape[2]), dim=1).indices
        best, number, *found = everyone.gather(2, chosen.expand(len(everyone), -1, -1)).unbind()
        return [best.to(scores.dtype), number.long(), *(each.to(scores.dtype) for each in found)]


class _StagedDualObjective(DualObjective):
    """The part of one stage; every stage makes one and calls the same methods, with the same domains.

    ``box`` and ``bounds`` are the stage's. The rows are over the model's output; ``start`` names the stage's own.
    """

    is_alone = False

    def __init__(self, staged: Staged, box: Interval, bounds: Interval, specification_rows: SpecificationRows) -> None:
        self.line = staged.line
        super().__init__(staged.network, box, bounds, specification_rows)

    def _index_neurons(self, device: torch.device) -> NeuronIndexing:
        return _StagedNeuronIndex.of(self.line, NeuronIndex.of(self.network, self.preactivations, device))

    def backward_bound(
        self, batch: DomainBatch, relaxed: Mapping[str, Relaxed], boxes: Interval, weights: Tensor
    ) -> Tensor:
        before = None if self.line.is_first else _PreviousStages(self.line)
        backward = Pass(self.network, {self.network.graph.input.name: boxes}, relaxed, before=before, ascends=True)
        start = self.network.graph.output
        if self.line.is_last:
            rows, offset = self.combine_rows(batch, weights)
            found = backward.lower_bounds(start.name, rows.reshape(len(rows), 1, *start.shape)).squeeze(1) - offset
            found = self.network.tp_group.agree(found)
        else:
            rows = _RowsFromNext.apply(weights, self.line)  # type: ignore[no-untyped-call]
            found = backward.lower_bounds(start.name, rows, own=False)
        told: Tensor = _MarginsToAll.apply(found, self.line)  # type: ignore[no-untyped-call]
        return told

    def _agree_on(self, weights: Tensor) -> Tensor:
        return self.line.of_last(super()._agree_on(weights))

    def minimiser(self, boxes: Interval, arrived: Sequence[Tensor]) -> Tensor:
        return self.line.of_first(super().minimiser(boxes, arrived) if self.line.is_first else None)


@dataclass(frozen=True, eq=False)
class _PreviousStages:
    """The stages before this one, which take the same step."""

    line: StageLink

    def lower_bounds(self, rows: Tensor, own: bool) -> Tensor:
        found: Tensor = _BoundsFromPrevious.apply(rows, self.line)  # type: ignore[no-untyped-call]
        return found

    def restart(self) -> None:
        """Do nothing: the search itself keeps the parameters of its domains."""


class _BoundsFromPrevious(torch.autograd.Function):
    """Sends rows to the previous stage and receives bounds; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, line: StageLink) -> Tensor:
        ctx.line = line
        line.to_previous(rows)
        return line.from_previous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.line.to_previous(gradient)
        return ctx.line.from_previous(), None


class _RowsFromNext(torch.autograd.Function):
    """Receives rows from the next stage, and later sends their gradient; ``anchor`` gets a zero gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, line: StageLink) -> Tensor:
        ctx.line, ctx.like = line, anchor
        return line.from_next()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.line.to_next(gradient)
        return torch.zeros_like(ctx.like), None


class _MarginsToAll(torch.autograd.Function):
    """Sends a stage's bounds to the next stage, and the last stage's margins to all; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, line: StageLink) -> Tensor:
        ctx.line = line
        if not line.is_last:
            line.to_next(found)
        return line.of_last(found).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient if ctx.line.is_last else ctx.line.from_next(), None


def dual_objective(
    engine: BoundingEngine, box: Interval, bounds: Interval, rows: SpecificationRows, clipped: Tensor | None = None
) -> DualObjective:
    """Return the dual objective of domains of one box; ``box`` bounds the input of this rank's network. Only a whole
    network has ``clipped`` entries.
    """
    if engine.stages is None:
        return DualObjective(engine.network, box, bounds, rows, clipped)
    return _StagedDualObjective(engine.stages, box, bounds, rows)
