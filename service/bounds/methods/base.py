"""What every method gives: bounds on the non-linear operators' inputs, and bounds of any rows of the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from service.bounds.backward import Pass
from service.bounds.extent import entries_of_a_row
from service.bounds.interval import Interval
from service.bounds.memory import UNLIMITED, MemoryBudget, in_parts
from service.bounds.methods.progress import ProgressMeter
from service.bounds.network import Network
from service.bounds.optimise import Ascent

T = TypeVar("T")


@dataclass(frozen=True)
class Effort:
    """How much a method may spend.

    ``intersect`` keeps the tighter of interval and linear intermediate bounds; off, linear ones replace them, as
    in the plain rule of the literature. ``elements`` bounds the size of one coefficient tensor, and so the memory:
    more rows than fit walk in parts. ``memory`` is what may be taken at all, and ``is_planned`` says that ``elements``
    fit into it, as far as all ranks know. ``ascent`` is for methods that optimise. ``progress`` is told how far an
    analysis is; efforts that differ in it alone are equal.
    """

    intersect: bool = True
    elements: int = 2**26
    ascent: Ascent = field(default_factory=Ascent)
    memory: MemoryBudget = UNLIMITED
    is_planned: bool = False
    progress: ProgressMeter | None = field(default=None, compare=False)

    def within(self, device: torch.device, least: Callable[[int], int] = lambda count: count) -> Effort:
        """Less where a device has little memory left, on all ranks the ``least`` that fits on any.

        Raises :class:`~service.bounds.memory.MemoryShortageError`.
        """
        if self.is_planned:
            return self
        elements = self.memory.plan(device, BYTES_FOR_AN_ELEMENT, self.elements, least=least)
        return replace(self, elements=elements, is_planned=True)

    def passing(self, total: int) -> Effort:
        """For ``total`` elements of coefficients: parts are larger where there is much, since each costs launches."""
        return replace(self, elements=min(self.elements, max(USUAL, total // 3)))

    def optimising(self, total: int) -> Effort:
        """For ``total`` elements of coefficients: a gradient keeps several tensors of each layer.

        Small parts stay in the device's cache, but too many of them cost launches.
        """
        return replace(self, elements=max(1, self.elements // 32, min(self.elements // 8, total // 8)))


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

        def bounds(part: slice) -> Tensor:
            found = self.backward.lower_bounds(network.graph.output.name, rows[:, part])
            if self.effort.progress is not None:
                self.effort.progress.add(network.graph.output.name, found.shape[1], rows.device)
            return found

        return torch.cat(parts_of_rows(self.backward, rows.shape[1], at_once, bounds), dim=1)


def rows_at_once(backward: Pass, start: str, effort: Effort) -> int:
    """How many rows of ``start`` may walk together; the same number on every rank of the group."""
    return max(1, effort.elements // elements_of_row(backward, start))


def passing_at_once(backward: Pass, start: str, rows: int, effort: Effort) -> int:
    """The same for one plain pass over ``rows`` rows."""
    each = elements_of_row(backward, start)
    return max(1, effort.passing(rows * each).elements // each)


def parts_of_rows(backward: Pass, total: int, at_once: int, run: Callable[[slice], T]) -> list[T]:
    """``run`` for ``at_once`` of ``total`` rows at a time, fewer where memory runs out and no other rank waits."""
    return in_parts(total, at_once, run, backward.device, alone=backward.network.is_alone)


def affordable(network: Network, box: Interval, effort: Effort) -> Effort:
    """Within the memory of the device, or of the one that has the least: ranks take the same parts.

    Asked once for each analysis, and not for a small one unless memory is limited: a driver takes its time to answer.
    """
    device, exchange = box.lower.device, network.exchange
    is_little = 2 * len(box.lower) * network.widest**2 * BYTES_FOR_AN_ELEMENT <= LITTLE
    if exchange.axis.size == 1 and is_little and effort.memory.limit is None:
        return effort
    return effort.within(device, lambda count: exchange.least(count, device))


def elements_of_row(backward: Pass, start: str) -> int:
    return elements_of_a_row(backward.network, start, backward.batch, divided=backward.divided)


def elements_of_a_row(network: Network, start: str, batch: int, *, divided: bool = False) -> int:
    """What a row takes in the largest coefficient tensor of one rank, which that rank's own device must hold.

    Where ``start`` is divided, each rank has rows of its own, and further on all of them walk on every rank. Rows are
    ``divided`` as those of a pass.
    """
    before = 0 if network.before is None else network.before.entries
    return batch * network.shares(start) * max(entries_of_a_row(network, start, divided=divided), before)
