"""Searches through a model in pipeline stages: every stage has the same domains, and they bound them together.

What is decided is decided from numbers that the stages have from one of them. Inputs and activations are split as
everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.methods import Effort, Method
from service.bounds.planes import Known, Planes, minimum
from service.bounds.stages import Staged
from service.verification.bab.inputs.input_bounds import ENDS

COPIES = 64
"""Of the widest value, that a box takes in a stage."""


@dataclass(frozen=True, eq=False)
class StagedInputBounds:
    """A :class:`~service.verification.bab.inputs.input_bounds.InputBounds` that all stages call."""

    staged: Staged
    method: Method
    effort: Effort

    @property
    def entries(self) -> int:
        return self.staged.widest * COPIES

    @property
    def floats(self) -> int:
        return self.staged.widest * COPIES + self.staged.entries * ENDS

    @torch.no_grad()
    def planes(self, box: Interval, known: Known, rows: Tensor) -> Planes:
        line, nothing = self.staged.line, box.lower.new_zeros(1, 1, box.lower.shape[1])
        box_with_record = _RecordingBox(box.lower, box.upper, [])
        analysis = self.staged.method(self.method)(self.staged.network, box_with_record, self.effort)
        box_with_record.arrived.clear()
        least = self.staged.network.exchange.agree(analysis.lower_bounds(rows.unsqueeze(0)))
        coefficients = line.of_first(self._slopes(box_with_record.arrived, least, nothing) if line.is_first else None)
        return Planes(coefficients, least - minimum(box, coefficients, torch.zeros_like(least)), {}, nothing)

    def _slopes(self, arrived: list[Tensor], least: Tensor, nothing: Tensor) -> Tensor:
        """Coefficients ``(batch, rows, features)`` of all rows at the input; zeros where their order is not known."""
        exchange, (batch, rows) = self.staged.network.exchange, least.shape
        flat = [exchange.gather(each.flatten(2).expand(batch, -1, -1), 1) for each in arrived]
        # Tensor-parallel ranks have shares of rows that are filled up to as many on each, part by part.
        if len(flat) == 1 or (flat and exchange.axis.size == 1):
            return exchange.agree(torch.cat(flat, dim=1)[:, :rows])
        return nothing.expand(batch, rows, -1)


@dataclass(frozen=True, eq=False)
class _RecordingBox(Interval):
    """Keeps the coefficients ``(batch or 1, rows, *shape)`` that it was asked about."""

    arrived: list[Tensor]

    def arranged(self, function: Callable[[Tensor], Tensor]) -> _RecordingBox:
        return _RecordingBox(function(self.lower), function(self.upper), self.arrived)

    def least(self, coefficients: Tensor) -> Tensor:
        self.arrived.append(coefficients)
        return super().least(coefficients)
