"""A family of lines from a table that is made once: optimising costs a look-up, whatever the function."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.relaxation import Relaxation


@dataclass(frozen=True, eq=False)
class LineTable:
    """Lower lines and upper lines, each in an order; a parameter is a place in that order, between two neighbours.

    What lies between two sound lines is sound. One parameter does for an entry of a row, since a row's coefficient
    has one sign, and takes a lower line or an upper one. ``slopes`` and ``intercepts`` are ``(batch, 2·lines, n)``
    with the lower lines first, ``rises`` their differences to the next line.
    """

    slopes: Tensor
    intercepts: Tensor
    slope_rises: Tensor
    intercept_rises: Tensor
    start: tuple[Tensor, ...]

    @classmethod
    def of(cls, lines: Relaxation, start: Tensor) -> LineTable:
        """Of lines ``(batch, lines, *shape)``, starting at place ``start`` ``(batch, *shape)``, 0 to 1."""
        assert lines.lower_intercept is not None
        assert lines.upper_intercept is not None
        slopes = torch.cat([lines.lower_slope, lines.upper_slope], dim=1).flatten(2)
        intercepts = torch.cat([lines.lower_intercept, lines.upper_intercept], dim=1).flatten(2)
        return cls(slopes, intercepts, _rises(slopes), _rises(intercepts), (start,))

    def member(self, parameters: tuple[Tensor, ...]) -> _Chosen:
        return _Chosen(self, parameters[0].flatten(2))


@dataclass(frozen=True, eq=False)
class _Chosen:
    table: LineTable
    place: Tensor

    def pull(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        table, flat = self.table, coefficients.flatten(2)
        lines = table.slopes.shape[1] // 2
        flat, place = torch.broadcast_tensors(flat, self.place * (lines - 1))  # type: ignore[no-untyped-call]
        line = place.detach().floor().clamp(0, lines - 2)
        beyond = place - line
        index = line.long() + lines * (flat.detach() < 0)
        slope = torch.addcmul(table.slopes.gather(1, index), beyond, table.slope_rises.gather(1, index))
        intercept = torch.addcmul(table.intercepts.gather(1, index), beyond, table.intercept_rises.gather(1, index))
        through = (flat * slope).reshape(*flat.shape[:2], *coefficients.shape[2:])
        return (through,), (flat * intercept).sum(dim=2)


def _rises(table: Tensor) -> Tensor:
    """From each line to the next; none where there is no finite line."""
    return torch.cat([table.diff(dim=1), torch.zeros_like(table[:, :1])], dim=1).nan_to_num(0, 0, 0)
