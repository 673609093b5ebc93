"""Linear bounds of one non-linear operator, and how a backward pass goes through them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from torch import Tensor

from service.bounds import fused
from service.bounds.fused import Picked
from service.bounds.windows import Windows


class Relaxed(Protocol):
    """What a backward pass needs of an operator that was relaxed on its inputs' bounds."""

    def pull(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Coefficients on each input, and the bias ``(batch, rows)``, that bound ``coefficients · f`` from below.

        ``coefficients`` is ``(batch or 1, rows, *shape of the output)``.
        """


class Family(Protocol):
    """All relaxations of one operator on fixed bounds that an optimiser may choose from.

    A member is named by parameters between 0 and 1, every one of which is sound. ``start`` has their values for the
    member that CROWN takes, each ``(batch, *any)``; it is empty where there is nothing to choose.
    """

    @property
    def start(self) -> tuple[Tensor, ...]: ...

    def member(self, parameters: tuple[Tensor, ...]) -> Relaxed:
        """Of parameters ``(batch, rows or 1, *any)``; what it gives is differentiable in them."""


@runtime_checkable
class Picking(Protocol):
    """What can be pulled through without a copy of a matrix' rows."""

    def pull_picked(self, rows: Picked) -> tuple[tuple[Tensor, ...], Tensor | None] | None:
        """``None`` where there must be one after all."""


@runtime_checkable
class Windowed(Protocol):
    """What can be pulled through without making rows whole."""

    def pull_windows(self, windows: Windows) -> tuple[Windows, Tensor | None] | None:
        """``None`` where they must be made whole after all."""


@runtime_checkable
class WindowedFamily(Protocol):
    """A family that has one like itself for what windows show of its operator."""

    def shown(self, windows: Windows) -> Family:
        """``start`` is then ``(batch, rows, *shape of a window)``, and members pull the windows' values."""


@dataclass(frozen=True, eq=False)
class Single:
    """A family of one."""

    relaxed: Relaxed
    start: tuple[Tensor, ...] = ()

    def member(self, parameters: tuple[Tensor, ...]) -> Relaxed:
        return self.relaxed


@dataclass(frozen=True, eq=False)
class Lines:
    """``lower_slope·z + lower_intercept ≤ f(z) ≤ upper_slope·z + upper_intercept``, with lines for each row.

    All tensors are ``(batch, rows or 1, *shape)`` of the operator's input; an intercept of ``None`` is zero.
    """

    lower_slope: Tensor
    upper_slope: Tensor
    lower_intercept: Tensor | None = None
    upper_intercept: Tensor | None = None

    def pull(self, coefficients: Tensor | Picked) -> tuple[tuple[Tensor, ...], Tensor | None]:
        lines = self.lower_slope, self.upper_slope, self.lower_intercept, self.upper_intercept
        through, bias = fused.pull(coefficients, *lines)
        return (through,), bias


@dataclass(frozen=True, eq=False)
class Relaxation:
    """The same lines for every row: tensors ``(batch, *shape)``."""

    lower_slope: Tensor
    upper_slope: Tensor
    lower_intercept: Tensor | None = None
    upper_intercept: Tensor | None = None

    def pull(self, coefficients: Tensor | Picked) -> tuple[tuple[Tensor, ...], Tensor | None]:
        slopes = self.lower_slope.unsqueeze(1), self.upper_slope.unsqueeze(1)
        intercepts = (
            None if each is None else each.unsqueeze(1) for each in (self.lower_intercept, self.upper_intercept)
        )
        return Lines(*slopes, *intercepts).pull(coefficients)

    def pull_picked(self, rows: Picked) -> tuple[tuple[Tensor, ...], Tensor | None]:
        return self.pull(rows)

    def pull_windows(self, windows: Windows) -> tuple[Windows, Tensor | None]:
        lines = self.lower_slope, self.upper_slope, self.lower_intercept, self.upper_intercept
        found = fused.pull_in_windows(windows.values, windows.place, windows.moves, lines)
        if found is not None:
            return replace(windows, values=found[0], inside=True), found[1]
        slopes = windows.of(self.lower_slope), windows.of(self.upper_slope)
        intercepts = (
            None if each is None else windows.of(each) for each in (self.lower_intercept, self.upper_intercept)
        )
        (values,), bias = Lines(*slopes, *intercepts).pull(windows.values)
        return replace(windows, values=values, inside=True), bias
