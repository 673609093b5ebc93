"""The budget of a bounding method: rows at a time, memory, and steps of its optimiser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

import torch

from service.bounds.interval import Interval
from service.bounds.memory import UNLIMITED, MemoryBudget
from service.bounds.network import Network
from service.bounds.optimise import Ascent, Gains
from service.bounds.progress import ProgressMeter, TimeLimit


@dataclass(frozen=True)
class BoundOptions:
    """Holds the limits of a bounding method, and the rule by which it keeps intermediate bounds.

    ``intersect`` keeps the tighter of interval and linear intermediate bounds; off, linear ones replace them, as in
    the plain rule of the literature. ``elements`` bounds the size of one coefficient tensor, and so the memory: more
    rows than fit go in parts; of very many rows without gradients, in parts of up to ``without_gradient``. ``memory``
    is the limit of all memory, and ``is_planned`` says that all ranks have fitted both to it. ``ascent`` is for
    methods that optimise, and ``gains`` collects their gain. ``progress`` is told how far an analysis is. Options that
    differ only in these listeners are equal.
    """

    intersect: bool = True
    elements: int = 2**26
    without_gradient: int = 0
    ascent: Ascent = field(default_factory=Ascent)
    memory: MemoryBudget = UNLIMITED
    is_planned: bool = False
    progress: ProgressMeter | None = field(default=None, compare=False)
    gains: Gains = field(default_factory=Gains, compare=False)

    def until(self, deadline: float, tell: Callable[[float], None] = lambda _: None) -> BoundOptions:
        """Return options of analyses that end with :class:`~service.bounds.progress.OutOfTimeError` after
        ``deadline`` (``time.monotonic``), for ranks that no other waits for; ``tell`` is told of their
        progress.
        """
        ascent = replace(self.ascent, deadline=deadline)
        return replace(self, ascent=ascent, progress=TimeLimit(tell, deadline=deadline))

    @property
    def deadline(self) -> float:
        """Return the moment after which analyses end (``time.monotonic``), infinite if they do not."""
        return self.progress.deadline if isinstance(self.progress, TimeLimit) else inf

    def within(self, device: torch.device, least: Callable[[int], int] = lambda count: count) -> BoundOptions:
        """Return fewer elements if a device has little memory left, on all ranks the ``least`` that fits on any.

        Raises :class:`~service.bounds.memory.MemoryShortageError`.
        """
        if self.is_planned:
            return self
        elements = self.memory.plan(device, BYTES_FOR_AN_ELEMENT, self.elements, least=least)
        if device.type != "cuda":
            return replace(self, elements=elements, is_planned=True)
        plain = self.memory.plan(device, BYTES_WITHOUT_GRADIENT, LARGER * self.elements, least=least)
        return replace(self, elements=elements, without_gradient=plain, is_planned=True)

    def passing(self, total: int) -> int:
        """Return the elements of a part of ``total`` ones without gradients: many elements go in larger parts, as each
        part costs launches.
        """
        usual, most = min(self.elements, max(USUAL, total // 3)), max(self.elements, self.without_gradient)
        return min(most, max(usual, total // MOST_PARTS))

    def optimising(self, total: int) -> BoundOptions:
        """Return the options for ``total`` elements with gradients, which keep several tensors of each layer.

        Small parts stay in the device's cache, but too many of them cost launches.
        """
        return replace(self, elements=max(1, self.elements // 32, min(self.elements // 8, total // 8)))


USUAL = 2**24
"""Elements of a part of a pass, unless there would be more than three parts."""
MOST_PARTS = 64
"""Parts of a pass beyond which they become larger instead, where memory lets them."""
LITTLE = 2**29
"""Bytes for which the device's free memory is not asked."""
BYTES_FOR_AN_ELEMENT, BYTES_WITHOUT_GRADIENT = 256, 64
"""Bytes for an element of the largest coefficient tensor, in all tensors that a pass through a deep network
holds at once, with its gradient and without.
"""
LARGER = 16
"""How many times as large parts without gradients may be on a CUDA device."""


def affordable(
    network: Network, box: Interval, options: BoundOptions, each: int = BYTES_FOR_AN_ELEMENT
) -> BoundOptions:
    """Return options within the memory of the device that has the least: ranks take the same parts.

    The driver is asked once for each analysis, and not for a small one unless memory is limited: it is slow to
    answer. A small one takes little with ``each`` bytes for an element.
    """
    device, tp_group = box.lower.device, network.tp_group
    is_little = 2 * len(box.lower) * network.widest**2 * each <= LITTLE
    if tp_group.axis.size == 1 and is_little and options.memory.limit is None:
        return options
    return options.within(device, lambda count: tp_group.least(count, device))
