"""Bounds by α-CROWN (Xu et al., 2021): relaxations are optimised for every bound, including intermediate ones.

The bounds on an operator's input are optimised for their own tightness, layer by layer. That is no worse than
optimising them for the output: for any fixed relaxations of later layers, a tighter input only tightens the
output.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from service.bounds.flat import by_instance
from service.bounds.interval import Interval
from service.bounds.linear.plain import Pass
from service.bounds.linear.propagation import InitialRows
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.memory import halving
from service.bounds.methods.base import (
    Analysis,
    elements_of_row,
    no_looser_than_intervals,
    parts_of_rows,
    passing_at_once,
    rows_at_once,
)
from service.bounds.methods.layers import bound_layers, numbers, one_pass
from service.bounds.methods.passes import inputs_of
from service.bounds.network import Network
from service.bounds.open_rows import OpenRowsOptimiser
from service.bounds.optimise import Ascent, Brought, Families, RowOptimiser
from service.bounds.options import BoundOptions, affordable

LOG = logging.getLogger(__name__)
Part = TypeVar("Part", Tensor, IdentityRows)


def _optimised_lower_bounds(
    families: Families,
    start: str,
    parts: Iterator[tuple[InitialRows, Tensor | None]],
    ascent: Ascent,
    brought: Brought | None = None,
) -> Tensor:
    """Return lower bounds ``(batch, rows)`` of all parts, joined, with upper bounds if there are any.

    Parts of one shape share a record on a device; elsewhere each leaves out its settled rows. ``brought`` gets the gain
    of the iterations.
    """
    backward = families.backward
    if backward.device.type == "cpu" and backward.network.is_alone:
        each = [
            OpenRowsOptimiser(families, start, rows, ascent, brought).best_bounds(rows, above) for rows, above in parts
        ]
        return torch.cat(each, dim=1)
    optimisers: dict[tuple[int, ...], RowOptimiser] = {}
    found = []
    for rows, above in parts:
        shape = tuple((rows.index if isinstance(rows, IdentityRows) else rows).shape)
        if shape not in optimisers:
            optimisers.clear()
            optimisers[shape] = RowOptimiser(families, start, rows, ascent, brought)
        found.append(optimisers[shape].best_bounds(rows, above))
    return torch.cat(found, dim=1)


@dataclass(frozen=True, eq=False)
class OptimisedAnalysis:
    """Answers with relaxations of ``families`` that are optimised for each requested row."""

    families: Families
    inputs: Mapping[str, tuple[Interval, ...]]
    options: BoundOptions

    @property
    def backward(self) -> Pass:
        return self.families.backward

    def lower_bounds(self, rows: Tensor) -> Tensor:
        start, count = self.backward.network.graph.output.name, rows.shape[1]
        at_once, above = _at_once(self.backward, start, count, self.options), self._above(rows)

        def bounds(at_once: int) -> Tensor:
            parts = _counted(_equal_parts(rows, at_once), self.backward, start, self.options)
            beside = zip(parts, _equal_parts(above, at_once), strict=True)
            ascent, asked = self.options.ascent, self.options.gains.asked
            return _optimised_lower_bounds(self.families, start, beside, ascent, asked)[:, :count]

        found = halving(at_once, bounds, self.backward.device, alone=self.backward.network.is_alone)
        LOG.info("alpha-crown: %s", self.options.gains)
        return no_looser_than_intervals(self.backward, rows, found, self.options)

    @torch.no_grad()
    def _above(self, rows: Tensor) -> Tensor:
        """Return upper bounds ``(batch, rows)`` by plain passes, which show the value of a gain."""
        start = self.backward.network.graph.output.name
        at_once = passing_at_once(self.backward, start, rows.shape[1], self.options)

        def bounds(part: slice) -> Tensor:
            return self.backward.lower_bounds(start, -rows[:, part])

        return -torch.cat(parts_of_rows(self.backward, rows.shape[1], at_once, bounds), dim=1)


def alpha_crown(network: Network, box: Interval, options: BoundOptions) -> Analysis:
    """Bound with optimised intermediate bounds, the literature's default."""
    options = affordable(network, box, options)
    refine = _Refining()
    backward = bound_layers(network, box, options, refine, decides=True, screens=True)
    return OptimisedAnalysis(refine.of(backward), inputs_of(network, backward.intervals), options)


@dataclass(eq=False)
class _Refining:
    """:func:`both_optimised` with the families of one pass, since making them takes as long as a few iterations."""

    families: Families | None = None

    def of(self, backward: Pass) -> Families:
        if self.families is None or self.families.backward is not backward:
            self.families = Families(backward)
        return self.families

    def __call__(self, backward: Pass, name: str, index: Tensor, options: BoundOptions) -> Interval:
        return both_optimised(backward, name, index, options, self.of(backward))


def both_optimised(
    backward: Pass, name: str, index: Tensor, options: BoundOptions, families: Families | None = None
) -> Interval:
    """Bound both sides of the entries ``index`` of a value, each optimised for itself.

    If that takes long, some are optimised first: if these gain almost nothing, the plain bounds of all are kept.
    """
    families = families or Families(backward)
    entries = index.shape[1] * backward.network.shares(name)
    if entries <= MANY or 2 * entries * elements_of_row(backward, name) <= WORTH_A_TRIAL[backward.device.type]:
        return _optimised(families, name, index, options)
    plain = one_pass(backward, name, index, options)
    some = _widest(backward, name, plain)
    if options.progress is not None:
        options.progress.expect(name, 2 * (index.shape[1] + some.shape[1]))
    tried = _optimised(families, name, index.expand(len(some), -1).gather(1, some), options)
    pays = _gain(backward, name, plain.map(lambda end: end.gather(1, some)), tried) > LEAST_GAIN
    if not bool(backward.network.tp_group.largest(int(pays.any()), backward.device)):
        return plain
    if options.progress is not None:
        options.progress.expect(name, 2 * (2 * index.shape[1] + some.shape[1]))
    best = _optimised(families, name, index, options)
    lower, upper = (torch.where(pays, new, old) for new, old in ((best.lower, plain.lower), (best.upper, plain.upper)))
    return Interval(lower, upper)


MANY, SOME, LEAST_GAIN = 128, 32, 5e-3
"""More entries than the first number are tried on some, the second number; the rest follows for that gain in width."""
WORTH_A_TRIAL = {"cpu": 2**19, "cuda": 2**28}
"""Elements of all rows that are optimised at once in less time than a trial takes. On a CUDA device that is mostly the
time to record it.
"""


def _widest(backward: Pass, name: str, plain: Interval) -> Tensor:
    """Return the places ``(batch, some)`` of the widest of all ranks' entries; equally many on each rank."""
    network = backward.network
    tp_group, widths = network.tp_group, plain.width.nan_to_num(nan=torch.inf)
    everyone = tp_group.gather(widths, 1) if network.is_own(name) else tp_group.agree(widths)
    least = everyone.topk(SOME, dim=1).values[:, -1:]
    chosen = (widths if network.is_own(name) else everyone) >= least
    count = tp_group.largest(int(chosen.sum(dim=1).amax().clamp(max=SOME)), backward.device)
    return numbers(chosen, count)


def _gain(backward: Pass, name: str, plain: Interval, tried: Interval) -> Tensor:
    """Return the share ``(batch, 1)`` by which the entries tried on all ranks became narrower in each instance."""
    network = backward.network
    before = plain.width
    known = before.isfinite() & (before > 0)
    sums = [torch.where(known, each.width, 0.0).sum(dim=1, keepdim=True) for each in (plain, tried)]
    both = torch.stack([sums[0], torch.minimum(*sums)])
    total = network.tp_group.sum(both) if network.is_own(name) else network.tp_group.agree(both)
    # If no width is known, optimising the rest pays.
    return torch.where(total[0] > 0, 1 - total[1] / total[0], 1.0)


def _optimised(families: Families, name: str, index: Tensor, options: BoundOptions) -> Interval:
    backward = families.backward
    pairs = max(1, _at_once(backward, name, 2 * index.shape[1], options) // 2)

    def bounds(pairs: int) -> Interval:
        parts = [IdentityRows(part) for part in _equal_parts(index, pairs)]
        counted = ((part, None) for part in _counted(parts, backward, name, options))
        found = _optimised_lower_bounds(families, name, counted, options.ascent, options.gains.intermediate)
        lower, negated = found.reshape(len(found), len(parts), 2, -1).unbind(2)
        return Interval(by_instance(lower)[:, : index.shape[1]], -by_instance(negated)[:, : index.shape[1]])

    return halving(pairs, bounds, backward.device, alone=backward.network.is_alone)


def alpha_crown_fixed(network: Network, box: Interval, options: BoundOptions) -> Analysis:
    """Bound with CROWN's intermediate bounds; only the requested rows are optimised."""
    options = affordable(network, box, options)
    backward = bound_layers(network, box, options, one_pass, decides=True)
    return OptimisedAnalysis(Families(backward), inputs_of(network, backward.intervals), options)


def _counted(parts: Sequence[Part], backward: Pass, name: str, options: BoundOptions) -> Iterator[Part]:
    """Yield the parts; each counts as bounded when the next one is requested."""
    for part in parts:
        yield part
        if options.progress is not None:
            rows = 2 * part.index.shape[1] if isinstance(part, IdentityRows) else part.shape[1]
            options.progress.add(name, rows, backward.device)


def _at_once(backward: Pass, start: str, rows: int, options: BoundOptions) -> int:
    return rows_at_once(backward, start, options.optimising(rows * elements_of_row(backward, start)))


def _equal_parts(rows: Tensor, at_once: int) -> list[Tensor]:
    """Return ``(b, rows, …)`` in as few parts as possible, padded with the last row, so that one shape is
    recorded only once.
    """
    count = -(-rows.shape[1] // at_once)
    size = -(-rows.shape[1] // count)
    missing = count * size - rows.shape[1]
    whole = torch.cat([rows, rows[:, -1:].expand(-1, missing, *rows.shape[2:])], dim=1)
    return list(torch.split(whole, size, dim=1))
