"""Backward passes that go on in the stages before: what is asked, and how it is answered.

A stage that asks for bounds of rows of its input has them from the stage before, which may have to ask in turn. Where
relaxations are optimised, each stage keeps the slopes of its own operators: rows go up the line and bounds come back,
then the bounds' gradient goes up and the rows' comes back, and every stage takes the step of its own slopes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from service.bounds.linear.plain import Pass
from service.bounds.linear.rigorous import RigorousPass
from service.bounds.network import OptimisedBefore
from service.bounds.optimise import Ascent, Families, SlopeOptimiser
from service.bounds.rigorous.method import plain_convolutions, through
from service.bounds.stages.link import StageLink


class StageRequest(IntEnum):
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
    """There is no more to be answered."""
    COMMON_ROWS_CHOSEN = 8
    OWN_ROWS_CHOSEN = 9
    """Rigorously, through what the last ascent has chosen."""
    COMMON_PLANES = 10
    OWN_PLANES = 11
    """Rigorous planes below the rows; coefficients and constants come in one tensor."""


@dataclass(frozen=True, eq=False)
class StagesBefore:
    """A :class:`~service.bounds.network.Before` that is asked over the line."""

    line: StageLink
    entries: int
    features: int

    def lower_bounds(self, rows: Tensor, own: bool) -> Tensor:
        return _asked(self.line, StageRequest.OWN_ROWS if own else StageRequest.COMMON_ROWS, rows)

    def optimised(self, anchor: Tensor) -> OptimisedBefore:
        tell(self.line, StageRequest.OPTIMISE)
        return _OptimisedStagesBefore(self.line, anchor)

    def chosen(self, rows: Tensor, own: bool) -> Tensor:
        return _asked(self.line, StageRequest.OWN_ROWS_CHOSEN if own else StageRequest.COMMON_ROWS_CHOSEN, rows)

    def planes(self, rows: Tensor, own: bool) -> tuple[Tensor, Tensor]:
        found = _asked(self.line, StageRequest.OWN_PLANES if own else StageRequest.COMMON_PLANES, rows)
        return found[..., :-1], found[..., -1]


@dataclass(frozen=True, eq=False)
class _OptimisedStagesBefore:
    line: StageLink
    anchor: Tensor

    def lower_bounds(self, rows: Tensor, own: bool) -> Tensor:
        found: Tensor = _Bounds.apply(rows, self.anchor, self.line, own)  # type: ignore[no-untyped-call]
        return found

    def restart(self) -> None:
        tell(self.line, StageRequest.RESTART)


class _Bounds(torch.autograd.Function):
    """Bounds of rows by the stages before. ``anchor`` takes a gradient where rows do not, since the stages wait."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor, line: StageLink, own: bool) -> Tensor:
        ctx.line = line
        return _asked(line, StageRequest.OWN_ROWS_OPTIMISED if own else StageRequest.COMMON_ROWS_OPTIMISED, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return _asked(ctx.line, StageRequest.GRADIENT, gradient), gradient.new_zeros(()), None, None


def tell(line: StageLink, asked: StageRequest) -> None:
    line.to_previous(torch.tensor([asked]))


def _asked(line: StageLink, asked: StageRequest, tensor: Tensor) -> Tensor:
    tell(line, asked)
    line.to_previous(tensor)
    return line.from_previous()


@dataclass(eq=False)
class Service:
    """This stage's answers to the next one, by passes from ``start``, its output."""

    line: StageLink
    backward: Pass
    start: str
    ascent: Ascent
    _optimiser: SlopeOptimiser | None = None
    _last: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def run(self) -> None:
        """Answer until nothing more is asked."""
        while (asked := StageRequest(int(self.line.from_next()))) is not StageRequest.NOTHING:
            self._answer(asked)

    def _answer(self, asked: StageRequest) -> None:
        if asked is StageRequest.OPTIMISE:
            self._last = None
            self._optimiser = SlopeOptimiser(Families(self.backward), self.start, self.ascent)
        elif asked is StageRequest.RESTART:
            self._current_optimiser.restart()
        elif asked is StageRequest.GRADIENT:
            self.line.to_next(self._stepped(self.line.from_next()))
        elif asked in (StageRequest.COMMON_ROWS_OPTIMISED, StageRequest.OWN_ROWS_OPTIMISED):
            own = asked is StageRequest.OWN_ROWS_OPTIMISED
            self.line.to_next(self._optimised_bounds(self.line.from_next(), own))
        else:
            self._optimiser = self._last = None
            self.line.to_next(self._bounds(self.line.from_next(), asked is StageRequest.OWN_ROWS))

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
class RigorousService(Service):
    """Answers that hold in real arithmetic; ``backward`` is what is optimised before."""

    rigorous: RigorousPass

    def run(self) -> None:
        with torch.no_grad(), plain_convolutions():
            super().run()

    def _answer(self, asked: StageRequest) -> None:
        if asked in (StageRequest.COMMON_ROWS_CHOSEN, StageRequest.OWN_ROWS_CHOSEN):
            rows, own = self.line.from_next(), asked is StageRequest.OWN_ROWS_CHOSEN
            self.line.to_next(through(self.rigorous, self._current_optimiser).lower_bounds(self.start, rows, own=own))
        elif asked in (StageRequest.COMMON_PLANES, StageRequest.OWN_PLANES):
            slopes, constants = self.rigorous.planes(
                self.start, self.line.from_next(), asked is StageRequest.OWN_PLANES
            )
            self.line.to_next(torch.cat([slopes, constants.unsqueeze(2)], dim=2))
        else:
            super()._answer(asked)

    def _bounds(self, rows: Tensor, own: bool) -> Tensor:
        return self.rigorous.lower_bounds(self.start, rows, own=own)
