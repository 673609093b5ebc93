"""A family of lines from a table that is made once: optimisation costs a look-up, whatever the function."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.flat import by_row
from service.bounds.fused import propagate_table
from service.bounds.relaxation import Relaxation, Relaxed


@dataclass(frozen=True, eq=False)
class LineTable:
    """Lower lines and upper lines, each in an order; a parameter is a place in that order, between two neighbours.

    A line between two sound lines is sound. One parameter suffices for an entry of a row, since a row's coefficient
    has one sign and so takes a lower line or an upper one. ``slopes`` and ``intercepts`` are ``(batch, 2·lines, n)``
    with the lower lines first.
    """

    slopes: Tensor
    intercepts: Tensor
    start: tuple[Tensor, ...]

    @classmethod
    def of(cls, lines: Relaxation, start: Tensor) -> LineTable:
        """Make a table of lines ``(batch, lines, *shape)``, starting at place ``start`` ``(batch, *shape)``, 0 to 1."""
        assert lines.lower_intercept is not None
        assert lines.upper_intercept is not None
        slopes = by_row(torch.cat([lines.lower_slope, lines.upper_slope], dim=1))
        intercepts = by_row(torch.cat([lines.lower_intercept, lines.upper_intercept], dim=1))
        return cls(slopes, intercepts, (start,))

    def member(self, parameters: tuple[Tensor, ...]) -> _LinesBetween:
        return _LinesBetween(self, by_row(parameters[0]))


@dataclass(frozen=True, eq=False)
class _LinesBetween(Relaxed):
    table: LineTable
    place: Tensor

    def backward(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        flat = by_row(coefficients)
        through, bias = propagate_table(flat, self.place, self.table.slopes, self.table.intercepts)
        return (through.reshape(*through.shape[:2], *coefficients.shape[2:]),), bias
