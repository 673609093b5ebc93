"""What every method gives: bounds on the non-linear operators' inputs, and bounds of any rows of the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from service.bounds.backward import Pass
from service.bounds.extent import entries_of_a_row
from service.bounds.interval import Interval
from service.bounds.methods.progress import ProgressMeter
from service.bounds.network import Network
from service.bounds.optimise import Ascent


@dataclass(frozen=True)
class Effort:
    """How much a method may spend.

    ``intersect`` keeps the tighter of interval and linear intermediate bounds; off, linear ones replace them, as
    in the plain rule of the literature. ``elements`` bounds the size of one coefficient tensor, and so the memory:
    more rows than fit walk in parts. ``ascent`` is for methods that optimise. ``progress`` is told how far an
    analysis is; efforts that differ in it alone are equal.
    """

    intersect: bool = True
    elements: int = 2**26
    ascent: Ascent = field(default_factory=Ascent)
    progress: ProgressMeter | None = field(default=None, compare=False)

    def within(self, device: torch.device) -> Effort:
        """Less where a device has little memory left, so that running out of it is not an outcome."""
        if device.type != "cuda":
            return self
        return replace(self, elements=max(1, min(self.elements, free_bytes(device) // BYTES_FOR_AN_ELEMENT)))

    def passing(self, total: int) -> Effort:
        """For ``total`` elements of coefficients: parts are larger where there is much, since each costs launches."""
        return replace(self, elements=min(self.elements, max(USUAL, total // 3)))

    def optimising(self, total: int) -> Effort:
        """For ``total`` elements of coefficients: a gradient keeps several tensors of each layer.

        Small parts stay in the device's cache, but too many of them cost launches.
        """
        return replace(self, elements=max(1, self.elements // 32, min(self.elements // 8, total // 8)))


def free_bytes(device: torch.device) -> int:
    """Of a CUDA device, with what torch holds without using it."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


USUAL = 2**24
"""Elements of a part of a pass, unless there would be more than three parts."""
LITTLE = 2**29
"""Bytes that are not worth asking about."""
BYTES_FOR_AN_ELEMENT = 256
"""Of the largest coefficient tensor, in all that a pass through a deep network holds at once, with its gradient."""


class Analysis(Protocol):
    """A network on one batch of boxes."""

    @property
    def inputs(self) -> Mapping[str, tuple[Interval, ...]]:
        """Bounds on the inputs of each non-linear node, by that node's name; this rank's entries where divided."""

    def lower_bounds(self, rows: Tensor) -> Tensor:
        """Lower bounds ``(batch, rows)`` of ``rows · output``, for rows ``(batch or 1, rows, *output shape)``."""


Method = Callable[[Network, Interval, Effort], Analysis]
"""``(network, box, effort)``; the box is ``(batch, *input shape)``, replicated over the tensor-parallel ranks."""


@dataclass(frozen=True, eq=False)
class LinearAnalysis:
    """An analysis that answers by one backward pass, or by several where the rows are many."""

    backward: Pass
    inputs: Mapping[str, tuple[Interval, ...]]
    effort: Effort

    def lower_bounds(self, rows: Tensor) -> Tensor:
        network = self.backward.network
        at_once = passing_at_once(self.backward, network.graph.output.name, rows.shape[1], self.effort)
        found = []
        for part in torch.split(rows, at_once, dim=1):
            found.append(self.backward.lower_bounds(network.graph.output.name, part))
            if self.effort.progress is not None:
                self.effort.progress.add(network.graph.output.name, part.shape[1], rows.device)
        return torch.cat(found, dim=1)


def rows_at_once(backward: Pass, start: str, effort: Effort) -> int:
    """How many rows of ``start`` may walk together; the same number on every rank of the group."""
    return max(1, effort.elements // elements_of_row(backward, start))


def passing_at_once(backward: Pass, start: str, rows: int, effort: Effort) -> int:
    """The same for one plain pass over ``rows`` rows."""
    each = elements_of_row(backward, start)
    return max(1, effort.passing(rows * each).elements // each)


def affordable(network: Network, box: Interval, effort: Effort) -> Effort:
    """Within the memory of the device, or of the one that has the least: ranks take the same parts.

    Asked once for each analysis, and not for a small one: a driver takes its time to answer.
    """
    device, exchange = box.lower.device, network.exchange
    if exchange.axis.size == 1 and 2 * len(box.lower) * network.widest**2 * BYTES_FOR_AN_ELEMENT <= LITTLE:
        return effort
    own = effort.within(device)
    if device.type != "cuda" or exchange.axis.size == 1:
        return own
    return replace(own, elements=-exchange.largest(-own.elements, device))


def elements_of_row(backward: Pass, start: str) -> int:
    return elements_of_a_row(backward.network, start, backward.batch, divided=backward.divided)


def elements_of_a_row(network: Network, start: str, batch: int, *, divided: bool = False) -> int:
    """What a row takes in the largest coefficient tensor of one rank, which that rank's own device must hold.

    Where ``start`` is divided, each rank has rows of its own, and further on all of them walk on every rank. Rows are
    ``divided`` as those of a pass.
    """
    before = 0 if network.before is None else network.before.entries
    return batch * network.shares(start) * max(entries_of_a_row(network, start, divided=divided), before)
