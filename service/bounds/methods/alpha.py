"""α-CROWN (Xu et al., 2021): relaxations are optimised for every bound, intermediate ones included.

The bounds on an operator's input are optimised for their own tightness, layer by layer. That loses nothing against
optimising them for the output: for any fixed relaxations of later layers a tighter input only tightens the output.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from service.bounds.interval import Interval
from service.bounds.linear.plain import Pass
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.memory import halving
from service.bounds.methods.base import Analysis, elements_of_row, no_looser_than_intervals, rows_at_once
from service.bounds.methods.ibp import inputs_of
from service.bounds.methods.layers import bound_layers, one_pass
from service.bounds.network import Network
from service.bounds.optimise import Brought, Families, optimised_lower_bounds
from service.bounds.options import BoundOptions, affordable

LOG = logging.getLogger(__name__)
Part = TypeVar("Part", Tensor, IdentityRows)


@dataclass(frozen=True, eq=False)
class OptimisedAnalysis:
    """Answers with relaxations that are optimised for each row asked for."""

    backward: Pass
    inputs: Mapping[str, tuple[Interval, ...]]
    options: BoundOptions

    def lower_bounds(self, rows: Tensor) -> Tensor:
        start = self.backward.network.graph.output.name
        at_once = _at_once(self.backward, start, rows.shape[1], self.options)

        def bounds(at_once: int) -> Tensor:
            parts = _counted(equal_parts(rows, at_once), self.backward, start, self.options)
            return optimised_lower_bounds(Families(self.backward), start, parts, self.options.ascent)[
                :, : rows.shape[1]
            ]

        found = halving(at_once, bounds, self.backward.device, alone=self.backward.network.is_alone)
        return no_looser_than_intervals(self.backward, rows, found, self.options)


def alpha_crown(network: Network, box: Interval, options: BoundOptions) -> Analysis:
    """Bound with optimised intermediate bounds, as the literature's default has it."""
    options, brought = affordable(network, box, options), Brought()
    backward = bound_layers(network, box, options, partial(both_optimised, brought=brought), decides=True)
    if brought.most:
        LOG.info("alpha-crown: %s", brought)
    return OptimisedAnalysis(backward, inputs_of(network, backward.intervals), options)


def both_optimised(
    backward: Pass, name: str, index: Tensor, options: BoundOptions, brought: Brought | None = None
) -> Interval:
    """Bound both sides of the entries ``index`` of a value, each optimised for itself; ``brought`` is told by how
    much.
    """
    pairs = max(1, _at_once(backward, name, 2 * index.shape[1], options) // 2)

    def bounds(pairs: int) -> Interval:
        parts = [IdentityRows(part) for part in equal_parts(index, pairs)]
        found = optimised_lower_bounds(
            Families(backward), name, _counted(parts, backward, name, options), options.ascent, brought
        )
        lower, negated = found.reshape(len(found), len(parts), 2, -1).unbind(2)
        return Interval(lower.flatten(1)[:, : index.shape[1]], -negated.flatten(1)[:, : index.shape[1]])

    return halving(pairs, bounds, backward.device, alone=backward.network.is_alone)


def alpha_crown_fixed(network: Network, box: Interval, options: BoundOptions) -> Analysis:
    """Bound with CROWN's intermediate bounds; only the rows asked for are optimised."""
    options = affordable(network, box, options)
    backward = bound_layers(network, box, options, one_pass, decides=True)
    return OptimisedAnalysis(backward, inputs_of(network, backward.intervals), options)


def _counted(parts: Sequence[Part], backward: Pass, name: str, options: BoundOptions) -> Iterator[Part]:
    """Yield the parts, each counted as bounded when the next one is asked for."""
    for part in parts:
        yield part
        if options.progress is not None:
            rows = 2 * part.index.shape[1] if isinstance(part, IdentityRows) else part.shape[1]
            options.progress.add(name, rows, backward.device)


def _at_once(backward: Pass, start: str, rows: int, options: BoundOptions) -> int:
    return rows_at_once(backward, start, options.optimising(rows * elements_of_row(backward, start)))


def equal_parts(rows: Tensor, at_once: int) -> list[Tensor]:
    """Return ``(b, rows, …)`` in as few parts as will do, filled up with the last row: one shape is recorded only
    once.
    """
    count = -(-rows.shape[1] // at_once)
    size = -(-rows.shape[1] // count)
    missing = count * size - rows.shape[1]
    whole = torch.cat([rows, rows[:, -1:].expand(-1, missing, *rows.shape[2:])], dim=1)
    return list(torch.split(whole, size, dim=1))
