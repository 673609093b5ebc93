"""Traverses a network forward, layer by layer: the counterpart of :mod:`service.bounds.linear.propagation`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.flat import by_instance
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.network import Network
from service.bounds.progress import ProgressMeter


@dataclass(eq=False)
class ForwardTraversal:
    """Bound every value of a network in execution order, in ``intervals``, which begin with the input's.

    A non-linear node's relaxation depends on the bounds of its inputs: before the first node that reads a
    value, its bounds are refined and made equal to the last bit on all ranks that have it. Without subclasses this is
    interval bound propagation (Gowal et al., 2018); they add to each layer.
    """

    network: Network
    intervals: dict[str, Interval]

    def run(self) -> None:
        """Bound all values. All ranks that have a part of the network call it."""
        reached = set[str]()
        for node in self.network.graph.nodes[1:]:
            if node.name in self.network.relaxed:
                for index, name in enumerate(node.inputs):
                    if name not in reached:
                        reached.add(name)
                        self.intervals[name] = self.network.agreed(name, self.intervals[name])
                        self.refine(node, index)
                self.relax(node)
            self.intervals[node.name] = self.propagate(node)

    def refine(self, node: Node, index: int) -> None:
        """Tighten the bounds of an input of ``node``, the first non-linear node that reads it.

        Subclasses use rows of backward passes, for the entries on which the relaxation depends:
        :class:`LayerSweep`, or :mod:`service.bounds.affine_forward` by a few common rows that all instances use, beside
        their affine forms.
        """

    def relax(self, node: Node) -> None:
        """Relax a non-linear node on the bounds of its inputs, for passes from later layers."""

    def propagate(self, node: Node) -> Interval:
        """Return bounds of a node's value from those of its inputs."""
        return self.network.interval(node, self.intervals)

    def bounds_of_inputs(self, node: Node) -> list[Interval]:
        """Return the bounds of a node's inputs, in their order."""
        return [self.intervals[name] for name in node.inputs]


class LayerArithmetic(ABC):
    """The arithmetic of a sweep over layers: plain (:mod:`service.bounds.methods.layers`), by rows that may differ
    among instances; or rigorous (:mod:`service.bounds.rigorous.method`), by common rows, so that bounds do not depend
    on the batch.
    """

    @abstractmethod
    def interval(self, node: Node) -> Interval:
        """Return bounds of a node's value from those of its inputs."""

    @abstractmethod
    def relax(self, node: Node, bounds: Sequence[Interval]) -> None:
        """Relax a non-linear node, for passes from later layers."""

    @abstractmethod
    def wanted_rows(self, node: Node, index: int) -> tuple[Tensor, Tensor]:
        """Return which entries of an input matter, bool ``(batch, n)``, and the entries that get rows, ``(batch or 1,
        rows)``.
        """

    @abstractmethod
    def bounds_of_entries(self, name: str, index: Tensor) -> Interval:
        """Return bounds ``(batch, rows)`` of a value's entries ``index`` ``(batch or 1, rows)``, by backward passes."""


@dataclass(eq=False)
class LayerSweep(ForwardTraversal):
    """Bound values by intervals, and those ``by_rows`` again by rows of backward passes before they are relaxed.

    Values ``at_once`` have rows for all entries as soon as they are reached. With ``intersect`` the tighter bounds of
    both kinds are kept; without, rows replace intervals.
    """

    arithmetic: LayerArithmetic
    by_rows: frozenset[str]
    at_once: frozenset[str] = frozenset()
    intersect: bool = True
    progress: ProgressMeter | None = None

    def refine(self, node: Node, index: int) -> None:
        name = node.inputs[index]
        if name in self.by_rows:
            wanted, rows = self.arithmetic.wanted_rows(node, index)
            tightened = self._tightened_by_rows(name, self.intervals[name], wanted, rows)
            self.intervals[name] = self.network.agreed(name, tightened)

    def relax(self, node: Node) -> None:
        self.arithmetic.relax(node, self.bounds_of_inputs(node))

    def propagate(self, node: Node) -> Interval:
        interval = self.arithmetic.interval(node)
        if node.name not in self.at_once:
            return interval
        everything = by_instance(torch.ones_like(interval.lower, dtype=torch.bool))
        index = torch.arange(everything.shape[1], device=everything.device).unsqueeze(0)
        return self._tightened_by_rows(node.name, interval, everything, index)

    def _tightened_by_rows(self, name: str, before: Interval, wanted: Tensor, index: Tensor) -> Interval:
        if self.progress is not None:
            self.progress.expect(name, 2 * index.shape[1])
        if not index.shape[1]:
            return before
        rows = self.arithmetic.bounds_of_entries(name, index)
        return with_rows(before, wanted, index, rows, intersect=self.intersect)


def with_rows(before: Interval, wanted: Tensor, index: Tensor, rows: Interval, *, intersect: bool) -> Interval:
    """Return bounds of a value in which ``rows`` replace those of the entries ``index`` that an instance has
    ``wanted``, bool ``(batch, n)``. An instance keeps its bounds of all other entries.
    """
    flat, everyone = before.map(by_instance), index.expand(len(wanted), -1)
    found = Interval(flat.lower.scatter(1, everyone, rows.lower), flat.upper.scatter(1, everyone, rows.upper))
    found = found.meet(flat) if intersect else found
    return Interval(
        torch.where(wanted, found.lower, flat.lower).view_as(before.lower),
        torch.where(wanted, found.upper, flat.upper).view_as(before.upper),
    )


def values_of_a_ball(network: Network, box: Interval) -> frozenset[str]:
    """Return the values for which a linear pass is tighter over a ball of inputs than over the box around it: those
    that the first non-linear node reads.

    There are none if the input is a box.
    """
    is_ball = bool(network.nonlinear) and not box.exact_layers
    return frozenset(network.nonlinear[0].inputs) - {network.graph.input.name} if is_ball else frozenset()
