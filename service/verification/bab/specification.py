"""A specification: an input set with the disjuncts of output constraints that a counterexample in it may satisfy.

A query's numbers are exact rationals. They are rounded here, once, to float64, outwards: a proof for the slightly
larger set covers the query. Counterexamples are checked on the rationals themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import compress
from math import inf, isfinite, nextafter

import torch
from torch import Tensor

from service.bounds.balls import BALLS
from service.bounds.interval import Interval
from service.formats.vnnlib import Disjunct, ExactBall, Halfspace, Number, Query, rounded_down, rounded_up
from service.verification.verdict import ABSOLUTE_MARGIN, RELATIVE_MARGIN

CPU = torch.device("cpu")
Counterexample = tuple[float, ...]
"""An input's numbers, in float64."""

UNSCALED = 64
"""Binary orders of magnitude from 1 at which a row's largest coefficient is left as it is."""


@dataclass(frozen=True, eq=False)
class Specification:
    """A counterexample has ``rows · y ≤ thresholds`` for all rows of one disjunct, float64.

    ``rows`` ``(rows, outputs)``; ``disjunct`` ``(rows,)`` numbers the disjunct of each row, from 0 without gaps. A row
    is within ``residues`` ``(rows, outputs)`` of the exact one. If that row is far larger or smaller than 1,
    both are multiples of it by a power of 2. ``lower``, ``upper`` ``(features,)`` are ends around the exact box;
    ``first``, ``last`` the least and the greatest float64 inputs in it. If there are none, both are one input at most
    ``missed`` ``(features,)`` away from the box. With ``ball``, the set is also in that ball around ``middle``
    ``(features,)``. ``exact_disjuncts`` are the disjuncts themselves. With ``input_rows`` ``(rows, features)``, which
    are 0 in rows of outputs, it has ``rows · y + input_rows · x ≤ thresholds``.
    """

    lower: Tensor
    upper: Tensor
    first: Tensor
    last: Tensor
    missed: Tensor
    rows: Tensor
    residues: Tensor
    thresholds: Tensor
    disjunct: Tensor
    middle: Tensor
    exact_disjuncts: tuple[Disjunct, ...]
    ball: ExactBall | None = None
    input_rows: Tensor | None = None

    def on(self, device: torch.device) -> Specification:
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)  # type: ignore[arg-type]

    @cached_property
    def disjunct_count(self) -> int:
        return int(self.disjunct.max()) + 1

    def of_disjuncts(self, chosen: Tensor) -> Specification:
        """Return the specification of some of the disjuncts, bool ``(disjuncts,)``, at least one."""
        rows = chosen[self.disjunct]
        cut = {name: getattr(self, name)[rows] for name in ("rows", "residues", "thresholds")}
        return replace(
            self,
            **cut,
            disjunct=(chosen.cumsum(0) - 1)[self.disjunct[rows]],
            exact_disjuncts=tuple(compress(self.exact_disjuncts, chosen.tolist())),
            input_rows=None if self.input_rows is None else self.input_rows[rows],
        )

    def box(self, dtype: torch.dtype) -> Interval:
        """Return the set of inputs, as one instance of this dtype."""
        ends = Interval(self.lower[None], self.upper[None])
        if self.ball is not None:
            return BALLS[self.ball.order].within(self.middle[None], self.ball.size, ends, dtype)
        return Interval.enclosing(ends.lower, ends.upper, dtype)

    def nearest(self, x: Tensor) -> Tensor:
        """Return float64 inputs ``(n, features)`` moved into the exact set, or as near to its box as ``missed``."""
        if self._inner is not None:
            x = self._inner.nearest(x)
        return torch.minimum(torch.maximum(x, self.first), self.last)

    @cached_property
    def _inner(self) -> Interval | None:
        """Return the ball, a little smaller, so that rounding cannot lead outside; ``None`` if there is none."""
        if self.ball is None:
            return None
        kind, middle = BALLS[self.ball.order], self.middle[None]
        ends = Interval(self.lower[None], self.upper[None])
        return kind.within(middle, kind.room(middle, self.ball.size), ends, torch.float64)

    def reached(self, x: Sequence[float], outputs: Interval) -> bool:
        """Return whether an input from :meth:`nearest` satisfies a disjunct exactly, by any outputs ``(outputs,)``
        between these.
        """
        return self.reached_by(x, outputs.lower.tolist(), outputs.upper.tolist())

    def reached_by(self, x: Sequence[float], lower: Sequence[Number], upper: Sequence[Number]) -> bool:
        """Return the same for outputs between these numbers."""
        if self.ball is not None and not self.ball.contains(x):
            return False
        return any(
            all(each.contains(lower, upper) for each in disjunct.halfspaces)
            and all(each.contains(x, x) for each in disjunct.constraints)
            for disjunct in self.exact_disjuncts
        )

    def lost(self, dtype: torch.dtype, reach: Tensor) -> Tensor:
        """Return the largest difference of rows ``(rows,)`` in a type from the exact ones.

        Outputs are at most ``reach`` ``(outputs,)`` in size.
        """
        error = self.residues + (self.rows - self.rows.to(dtype).double()).abs()
        return (1 + 1e-9) * torch.where(error > 0, error * reach, 0).sum(dim=1)

    def allowing(self, lost: Tensor) -> Specification:
        """Raise the thresholds by this amount ``(rows,)``; if it is not finite, any output reaches them."""
        known = lost.isfinite()
        rows = torch.where(known[:, None], self.rows, 0)
        thresholds = self.thresholds + torch.where(known, lost, 0)
        above = torch.nextafter(thresholds, torch.full_like(thresholds, inf))
        changed = torch.where(known, torch.where(lost > 0, above, self.thresholds), 0)
        return replace(self, rows=rows, residues=torch.zeros_like(rows), thresholds=changed)

    def excess(self, outputs: Tensor, x: Tensor | None = None) -> Tensor:
        """Return ``rows · y − thresholds`` of outputs ``(n, outputs)`` at inputs ``(n, features)``: ``(n, rows)``."""
        found = outputs @ self.rows.to(outputs.dtype).T - self.thresholds.to(outputs.dtype)
        if self.input_rows is None or x is None:
            return found
        return found + x.to(outputs.dtype) @ self.input_rows.to(outputs.dtype).T

    def of_inputs(self, dtype: torch.dtype) -> Interval | float:
        """Return the ends ``(rows,)`` of the terms of the box's inputs in the rows; 0 without such terms."""
        if self.input_rows is None:
            return 0.0
        rising, falling = self.input_rows.clamp(min=0), self.input_rows.clamp(max=0)
        least = rising @ self.lower + falling @ self.upper
        return Interval(least.to(dtype), (rising @ self.upper + falling @ self.lower).to(dtype))

    def offsets(self, least: Tensor, most: Tensor) -> Tensor:
        """Return the thresholds for bounds ``(rows,)`` of ``rows · y``: thresholds plus the margin for rounding.

        If a bound is not finite, rounding may explain any difference in this type.
        """
        dtype, largest = least.dtype, torch.finfo(least.dtype).max
        thresholds = self.thresholds.to(dtype)
        reach = torch.maximum(least.abs(), most.abs()).nan_to_num(nan=largest, posinf=largest) + thresholds.abs()
        return thresholds + ABSOLUTE_MARGIN[dtype] + RELATIVE_MARGIN[dtype] * reach

    def per_disjunct(self, values: Tensor) -> Tensor:
        """Return the largest of each disjunct's rows, ``(n, rows)`` to ``(n, disjuncts)``: all must be ≤ 0 at once."""
        index = self.disjunct.expand(len(values), -1)
        start = values.new_full((len(values), self.disjunct_count), -torch.inf)
        return start.scatter_reduce(1, index, values, "amax")

    def distance_to_nearest(self, excess: Tensor) -> Tensor:
        """Return the distance of inputs with an :meth:`excess` ``(n, rows)`` from satisfying the nearest
        disjunct, ``(n,)``: 0 or less satisfies it.
        """
        return self.per_disjunct(excess).amin(dim=1)


def specifications(query: Query, device: torch.device) -> list[Specification]:
    """Return one specification for each different box of the query."""
    # By identity first: disjuncts that share a box of many inputs are not compared number by number.
    shared: dict[tuple[int, ...], list[Disjunct]] = {}
    for disjunct in query.disjuncts:
        shared.setdefault(tuple(map(id, _box_of(disjunct))), []).append(disjunct)
    grouped: dict[tuple[object, ...], list[Disjunct]] = {}
    for disjuncts in shared.values():
        grouped.setdefault(_box_of(disjuncts[0]), []).extend(disjuncts)
    return [_specification(tuple(each), query.outputs, query.ball).on(device) for each in grouped.values()]


def _box_of(disjunct: Disjunct) -> tuple[object, ...]:
    return disjunct.lower, disjunct.upper, disjunct.open_lower, disjunct.open_upper


def _specification(disjuncts: tuple[Disjunct, ...], outputs: int, ball: ExactBall | None) -> Specification:
    # A disjunct without halfspaces accepts any output: a row of zeros is always satisfied.
    flat = [(index, each) for index, one in enumerate(disjuncts) for each in one.halfspaces or (ANYWHERE,)]
    rows, residues = torch.zeros(2, len(flat), outputs, dtype=torch.float64)
    thresholds = torch.zeros(len(flat), dtype=torch.float64)
    for row, (_, halfspace) in enumerate(flat):
        coefficients, threshold = _scale_halfspace(halfspace)
        above = rounded_up(threshold)
        if not isfinite(above):
            continue  # every finite output satisfies it
        # A float64 bound is above the next lower number exactly if it is not below the threshold.
        thresholds[row] = nextafter(above, -inf) if halfspace.strict else above
        for output, factor in coefficients:
            nearest = float(factor)
            rows[row, output], residues[row, output] = nearest, rounded_up(abs(factor - Fraction(nearest)))
    box = disjuncts[0]
    ends = [
        _ends(low, high, index in box.open_lower, index in box.open_upper)
        for index, (low, high) in enumerate(zip(box.lower, box.upper, strict=True))
    ]
    lower, upper, first, last, missed = torch.tensor(ends, dtype=torch.float64).T.contiguous()
    middle = lower / 2 + upper / 2 if ball is None else torch.tensor(ball.middle, dtype=torch.float64)
    number = torch.tensor([index for index, _ in flat])
    ends_of_box = lower, upper, first, last, missed
    found = Specification(*ends_of_box, rows, residues, thresholds, number, middle, disjuncts, ball)
    return _add_input_constraints(found) if any(each.constraints for each in disjuncts) else found


def _add_input_constraints(found: Specification) -> Specification:
    """Add a row for each constraint of inputs. Its threshold is raised by the rounding error of its terms in any type,
    so that no input that satisfies it exactly is excluded.
    """
    constraints = [(number, each) for number, one in enumerate(found.exact_disjuncts) for each in one.constraints]
    input_rows = torch.zeros(len(constraints), len(found.lower), dtype=torch.float64)
    thresholds = torch.zeros(len(constraints), dtype=torch.float64)
    for row, (_, constraint) in enumerate(constraints):
        coefficients, threshold = _scale_halfspace(constraint)
        for index, factor in coefficients:
            input_rows[row, index] = float(factor)
        thresholds[row] = rounded_up(threshold)
    reach = torch.maximum(found.lower.abs(), found.upper.abs())
    thresholds += COARSE * (input_rows.abs() @ reach + thresholds.abs())
    output_rows = torch.zeros(len(constraints), found.rows.shape[1], dtype=torch.float64)
    return replace(
        found,
        rows=torch.cat([found.rows, output_rows]),
        residues=torch.cat([found.residues, output_rows]),
        thresholds=torch.cat([found.thresholds, thresholds]),
        disjunct=torch.cat([found.disjunct, torch.tensor([number for number, _ in constraints])]),
        input_rows=torch.cat([torch.zeros(len(found.rows), len(found.lower), dtype=torch.float64), input_rows]),
    )


ANYWHERE = Halfspace((), 0)
COARSE = 2.0**-20
"""More than the terms of a constraint lose in float32, as a share of their sizes."""


def _scale_halfspace(halfspace: Halfspace) -> tuple[list[tuple[int, Fraction]], Fraction]:
    """Return its exact coefficients and threshold, multiplied by a power of 2 if the coefficients are far from 1."""
    factors = [(index, Fraction(factor)) for index, factor in halfspace.coefficients]
    threshold = Fraction(halfspace.threshold)
    largest = max((abs(factor) for _, factor in factors), default=Fraction(0))
    order = largest.numerator.bit_length() - largest.denominator.bit_length()
    if largest and abs(order) > UNSCALED:
        scale = Fraction(2) ** -order
        factors, threshold = [(index, scale * factor) for index, factor in factors], scale * threshold
    return factors, threshold


def _ends(low: Number, high: Number, after: bool, before: bool) -> tuple[float, float, float, float, float]:
    """Return ends around an input's interval, the first and the last number in it, and how far they are from it.

    The interval begins after ``low``, or ends before ``high``, if these are excluded.
    """
    below, first, last, above = rounded_down(low), rounded_up(low), rounded_down(high), rounded_up(high)
    first = nextafter(first, inf) if after and Fraction(first) == low else first
    last = nextafter(last, -inf) if before and Fraction(last) == high else last
    if first <= last:
        return below, above, first, last, 0.0
    nearest = min((below, above), key=lambda end: abs(Fraction(end) - Fraction(low)))
    missed = Fraction(high) - Fraction(low) if after or before else _distance(Fraction(nearest), low, high)
    return below, above, nearest, nearest, rounded_up(missed)


def _distance(point: Fraction, low: Number, high: Number) -> Fraction:
    return max(Fraction(low) - point, point - Fraction(high), Fraction(0))
