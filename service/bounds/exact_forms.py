"""Proves by rational arithmetic that outputs stay on one side of a plane, to the last digit.

In a box where every comparison has one answer, a piecewise linear network is affine, and the least value of an affine
function over a box is known exactly. If one input alone decides a comparison, the box is cut at that input's value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf

import torch

from service.bounds.exact import exact_values
from service.bounds.network import Network
from service.bounds.progress import check_time

MOST_BOXES, MOST_PRODUCTS = 64, 2**15
"""Most boxes into which one is cut, and most products of numbers in each."""

ROUNDED = Fraction(1, 1000)
"""A share of the size of compared values; rounding weights to float32 moves them by less."""

Ends = tuple[tuple[Fraction, ...], tuple[Fraction, ...]]


@dataclass(frozen=True)
class Plane:
    """``Σ factors[index]·y[index] > threshold``, or ``≥`` if it may be ``attained``."""

    factors: tuple[tuple[int, Fraction], ...]
    threshold: Fraction
    attained: bool


class OpenComparisonError(Exception):
    """A comparison has both answers in a box; ``form`` is compared with 0."""

    def __init__(self, form: ExactForm) -> None:
        super().__init__("a comparison has both answers")
        self.form = form


@dataclass(frozen=True, eq=False)
class ExactForm:
    """An affine function of the inputs of a box; a comparison has the answer that holds in the whole box."""

    factors: dict[int, Fraction]
    constant: Fraction
    box: Ends

    def __add__(self, other: ExactForm | Fraction) -> ExactForm:
        if isinstance(other, Fraction):
            return ExactForm(self.factors, self.constant + other, self.box)
        factors = dict(self.factors)
        for index, factor in other.factors.items():
            factors[index] = factors.get(index, Fraction(0)) + factor
        return ExactForm(
            {index: each for index, each in factors.items() if each}, self.constant + other.constant, self.box
        )

    __radd__ = __add__

    def __mul__(self, factor: Fraction) -> ExactForm:
        factors = {index: factor * each for index, each in self.factors.items() if factor}
        return ExactForm(factors, factor * self.constant, self.box)

    __rmul__ = __mul__

    def __ge__(self, other: ExactForm | Fraction | int) -> bool:
        difference = self + (Fraction(-1) * other if isinstance(other, ExactForm) else Fraction(-other))
        if difference.least >= 0:
            return True
        if (Fraction(-1) * difference).least >= 0:  # at most equal, where either answer is right
            return False
        raise OpenComparisonError(difference)

    __gt__ = __ge__

    def __lt__(self, other: ExactForm | Fraction | int) -> bool:
        return not self >= other

    @property
    def least(self) -> Fraction:
        """Return the least value in the box."""
        lower, upper = self.box
        ends = (factor * (lower[index] if factor > 0 else upper[index]) for index, factor in self.factors.items())
        return sum(ends, self.constant)


def may_keep(network: Network, box: Ends, deadline: float = inf) -> bool:
    """Return whether :func:`keeps_to` could prove anything of the network in this box, or of the same one in float64.
    It could not if a comparison that several inputs decide has both answers, by more than rounding explains.
    The network's constants are in float64, on the CPU. Raises as :func:`keeps_to` does.
    """
    lower, upper = box
    inputs = [ExactForm({index: Fraction(1)}, Fraction(0), box) for index in range(len(lower))]
    like = torch.zeros(len(lower), dtype=torch.float64)
    try:
        return exact_values(network, inputs, like, MOST_PRODUCTS // len(inputs), deadline) is not None
    except OpenComparisonError as error:
        form = error.form
        size = sum((abs(each) * max(abs(lower[at]), abs(upper[at])) for at, each in form.factors.items()), Fraction(0))
        doubt = ROUNDED * (size + abs(form.constant))
        return len(form.factors) == 1 or form.least >= -doubt or (Fraction(-1) * form).least >= -doubt


def keeps_to(network: Network, box: Ends, cases: Sequence[Sequence[Plane]], deadline: float = inf) -> bool:
    """Return whether it is proved that, in each part into which the box is cut, the outputs are on the right
    side of one plane of each case at every input.

    Raises :class:`~service.bounds.progress.OutOfTimeError` after ``deadline`` (``time.monotonic``).
    """
    like, left, open_ = torch.zeros(len(box[0]), dtype=torch.float64), MOST_BOXES, [box]
    while open_:
        lower, upper = open_.pop()
        left -= 1
        inputs = [ExactForm({index: Fraction(1)}, Fraction(0), (lower, upper)) for index in range(len(lower))]
        try:
            outputs = exact_values(network, inputs, like, MOST_PRODUCTS // len(inputs), deadline)
        except OpenComparisonError as error:
            parts = _parts(error.form)
            if parts is None or left <= 0:
                return False
            open_ += parts
            continue
        if outputs is None or not all(_holds_one(planes, outputs, deadline) for planes in cases):
            return False
    return True


def _parts(form: ExactForm) -> list[Ends] | None:
    """Cut the box where the form is 0, if one input alone decides about that."""
    if len(form.factors) != 1:
        return None
    ((index, factor),) = form.factors.items()
    at, (lower, upper) = -form.constant / factor, form.box
    return [(lower, (*upper[:index], at, *upper[index + 1 :])), ((*lower[:index], at, *lower[index + 1 :]), upper)]


def _holds_one(planes: Sequence[Plane], outputs: Sequence[ExactForm | Fraction], deadline: float) -> bool:
    check_time(deadline)
    return any(_holds(plane, outputs) for plane in planes)


def _holds(plane: Plane, outputs: Sequence[ExactForm | Fraction]) -> bool:
    total: ExactForm | Fraction = Fraction(0)
    for index, factor in plane.factors:
        total = total + factor * outputs[index]
    least = total.least if isinstance(total, ExactForm) else total
    return least >= plane.threshold if plane.attained else least > plane.threshold
