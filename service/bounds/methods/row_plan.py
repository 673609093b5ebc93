"""Plans which entries get rows: those that a box needs, or as many as a plan has for every box."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.linear.plain import Pass
from service.bounds.methods.base import elements_of_a_row
from service.bounds.methods.layers import numbers, wanted_entries, wanted_rows
from service.bounds.network import Network

CHEAP = 2**22
"""Elements of the coefficients of all of a value's rows below which choosing some is not worth it."""
STEPS, FEWEST = 16, 8
"""Steps of row counts below a power of two, and the fewest rows of a step."""


@dataclass(frozen=True)
class RowCount:
    """The number of rows that a value gets: of each instance's ``own``, or the same entries for all."""

    count: int
    own: bool


Plan = Mapping[str, RowCount]
"""Row counts by the value's name."""


@dataclass(eq=False)
class Noted:
    """:func:`wanted_rows`, and how many they are."""

    found: dict[str, RowCount] = field(default_factory=dict)

    def __call__(self, backward: Pass, node: Node, index_of_input: int) -> tuple[Tensor, Tensor]:
        wanted, index = wanted_rows(backward, node, index_of_input)
        self.found[node.inputs[index_of_input]] = RowCount(index.shape[1], own=len(index) > 1)
        return wanted, index


@dataclass(eq=False)
class Planned:
    """Choose as many rows as planned, whatever the boxes are, without a look at what the device has found.

    ``missing`` counts the entries that matter and get none, where there may be any: their bounds stay as they were,
    which is sound. Positive is too many.
    """

    plan: Plan
    missing: Tensor | None = None

    def __call__(self, backward: Pass, node: Node, index_of_input: int) -> tuple[Tensor, Tensor]:
        wanted, rows = wanted_entries(backward, node, index_of_input), self.plan[node.inputs[index_of_input]]
        size = wanted.shape[1]
        if rows.count >= size:
            return wanted, torch.arange(size, device=wanted.device)[None]
        chosen = wanted if rows.own else wanted.any(dim=0, keepdim=True)
        missing = chosen.sum(dim=1).amax() - rows.count
        self.missing = missing if self.missing is None else torch.maximum(self.missing, missing)
        return wanted, numbers(chosen, rows.count)


def planned(network: Network, batch: int, found: Plan, earlier: Plan) -> Plan:
    """Return a plan with room for a few more rows than were found, or were planned earlier; for all where that is
    cheap.
    """
    return {name: _planned(network, batch, name, rows, earlier.get(name)) for name, rows in found.items()}


def _planned(network: Network, batch: int, name: str, found: RowCount, earlier: RowCount | None) -> RowCount:
    size = network.nodes[name].size
    if 2 * size * elements_of_a_row(network, name, batch) <= CHEAP:
        return RowCount(size, own=False)
    step = max(FEWEST, (1 << (found.count - 1).bit_length()) // STEPS)
    count = -(-(found.count + step // 2) // step) * step
    if earlier is not None and earlier.own == found.own:
        count = max(count, earlier.count)
    return RowCount(count, found.own) if count < size else RowCount(size, own=False)
