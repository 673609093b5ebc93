"""α-CROWN (Xu et al., 2021): relaxations are optimised for every bound, intermediate ones included.

The bounds on an operator's input are optimised for their own tightness, layer by layer. That loses nothing against
optimising them for the output: for any fixed relaxations of later layers a tighter input only tightens the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.backward import Pass
from service.bounds.interval import Interval
from service.bounds.methods.base import Analysis, Effort, rows_at_once
from service.bounds.methods.ibp import inputs_of
from service.bounds.methods.layers import bound_layers, one_pass
from service.bounds.network import Network
from service.bounds.optimise import Families, optimised
from service.bounds.rules.base import UnitRows


@dataclass(frozen=True, eq=False)
class OptimisedAnalysis:
    """Answers with relaxations that are optimised for each row asked for."""

    backward: Pass
    inputs: Mapping[str, tuple[Interval, ...]]
    effort: Effort

    def lower_bounds(self, rows: Tensor) -> Tensor:
        network = self.backward.network
        start, batch = network.graph.output.name, len(self.backward.intervals[network.graph.input.name].lower)
        parts = torch.split(rows, rows_at_once(network, start, batch, self.effort.optimising), dim=1)
        return optimised(Families(self.backward), start, iter(parts), self.effort.ascent)


def alpha_crown(network: Network, box: Interval, effort: Effort) -> Analysis:
    """Intermediate bounds optimised too, as the literature's default has it."""

    def refine(backward: Pass, name: str, index: Tensor, pairs: int) -> Interval:
        pairs = max(1, rows_at_once(network, name, len(box.lower), effort.optimising) // 2)
        parts = (UnitRows(part) for part in torch.split(index, pairs, dim=1))
        return _both_sides(optimised(Families(backward), name, parts, effort.ascent), index.shape[1], pairs)

    backward = bound_layers(network, box, effort, refine)
    return OptimisedAnalysis(backward, inputs_of(network, backward.intervals), effort)


def alpha_crown_fixed(network: Network, box: Interval, effort: Effort) -> Analysis:
    """Intermediate bounds are CROWN's; only the rows asked for are optimised."""
    backward = bound_layers(network, box, effort, one_pass)
    return OptimisedAnalysis(backward, inputs_of(network, backward.intervals), effort)


def _both_sides(found: Tensor, rows: int, pairs: int) -> Interval:
    """Of parts, each the lower bounds of ``pairs`` rows and then those of the negated rows."""
    sizes = [min(pairs, rows - done) for done in range(0, rows, pairs)]
    halves = [part.chunk(2, dim=1) for part in torch.split(found, [2 * size for size in sizes], dim=1)]
    return Interval(torch.cat([low for low, _ in halves], dim=1), -torch.cat([high for _, high in halves], dim=1))
