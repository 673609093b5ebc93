"""Defines the interface of a branching score for activations, and its view of subproblems."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.network import Network
from service.bounds.relaxation import Relaxation, Relaxed
from service.bounds.split import PiecewiseSlopes, Preactivations

if TYPE_CHECKING:
    from service.verification.bab.activations.domain_bounds import DomainInspection


@dataclass(frozen=True)
class ActivationScore(ABC):
    """A score for every preactivation entry of a batch of subproblems; its fields are its settings."""

    @abstractmethod
    def scores(self, view: ActivationView) -> Tensor:
        """Return ``(n, entries)`` in the bounds' dtype, higher where a split promises more.

        A NaN counts as 0. The search leaves out entries that cannot be split, or whose split changes no
        relaxation, whatever their score. On tensor-parallel ranks and in pipeline stages the entries are this rank's
        own, and the scores of all ranks are compared: they must be in one unit.
        """


@dataclass(frozen=True, eq=False)
class ActivationView:
    """A batch of ``n`` bounded subproblems, as a score sees them.

    ``split_points`` ``(n, entries)`` is the value at which each entry would be split; ``relaxed_nodes`` are the
    non-linear nodes between the preactivations and the bounded rows.
    """

    network: Network
    preactivations: Preactivations
    relaxed_nodes: Sequence[Node]
    inspection: DomainInspection
    split_points: Tensor

    @cached_property
    def lower(self) -> Tensor:
        """Return the lower bounds ``(n, entries)`` of all preactivations."""
        return self.preactivations.flattened({name: each.lower for name, each in self.inspection.bounds.items()})

    @cached_property
    def upper(self) -> Tensor:
        """Return the upper bounds ``(n, entries)`` of all preactivations."""
        return self.preactivations.flattened({name: each.upper for name, each in self.inspection.bounds.items()})

    @property
    def loss_at_split_points(self) -> Tensor:
        """Return the relaxations' losses ``(n, entries)`` if each entry has its split value."""
        return self._usual_losses[0]

    @property
    def loss_at_minimiser(self) -> Tensor:
        """Return the relaxations' losses ``(n, entries)`` where the lower bound is attained."""
        return self._usual_losses[1]

    @cached_property
    def _usual_losses(self) -> Tensor:
        # Both in one evaluation of the operators: small networks wait for kernel launches.
        return self.losses_at(
            torch.stack([self.split_points, self.inspection.reached.clamp(min=self.lower, max=self.upper)])
        )

    def losses_at(self, values: Tensor) -> Tensor:
        """Return the losses of all readers' relaxations at ``(points, n, entries)`` values of the entries.

        With the coefficient a of ``f(z)``, the loss is a·f(z) less the line that bounds it from below. For an
        operator that reads several values, it is each value's part of the output's radius.
        """
        points = self.preactivations.unflattened(values.flatten(0, 1))
        losses = {value: torch.zeros_like(point) for value, point in points.items()}
        for node in self.relaxed_nodes:
            if node.name not in self.inspection.coefficients:
                continue
            for name, loss in zip(node.inputs, self._losses_of(node, points, len(values)), strict=True):
                losses[name] = losses[name] + loss
        return self.preactivations.flattened(losses).reshape(values.shape)

    def _losses_of(self, node: Node, points: dict[str, Tensor], times: int) -> list[Tensor]:
        """Return the loss of each of the node's inputs, ``(times · n, *shape)``."""
        bounds = [self.inspection.bounds[name] for name in node.inputs]
        arrived, operator = self.inspection.coefficients[node.name].squeeze(1), self.network.operator_of(node)
        arrived = operator.centred(arrived.unsqueeze(1), bounds).squeeze(1)
        relaxed = None if len(bounds) > 1 else self._relax(node, bounds)
        if not isinstance(relaxed, Relaxation):  # of several inputs, or a choice between constants
            shares = self._radius_shares(node, bounds, arrived)
            return [loss.expand(times, *loss.shape).flatten(0, 1) for loss in shares]
        z = points[node.inputs[0]]
        value = self.network.interval(node, {node.inputs[0]: Interval.point(z)}).lower
        shape = times, *arrived.shape
        return [_loss(relaxed, arrived, z.reshape(shape), value.reshape(shape)).flatten(0, 1)]

    def _relax(self, node: Node, bounds: list[Interval]) -> Relaxed:
        family = self.inspection.families[node.name]
        if isinstance(family, PiecewiseSlopes):
            return family.relaxation
        return self.network.operator_of(node).relax_on(node, bounds)

    def _radius_shares(self, node: Node, bounds: list[Interval], arrived: Tensor) -> list[Tensor]:
        """Return each input's share of the output's radius, to first order."""
        radii = [each.radius.requires_grad_() for each in bounds]
        centres = [each.centre for each in bounds]
        with torch.enable_grad():
            known = {
                name: Interval.around(centre, radius)
                for name, centre, radius in zip(node.inputs, centres, radii, strict=True)
            }
            weight = (self.network.interval(node, known).radius * arrived.abs()).sum()
        if not weight.requires_grad:  # constants are chosen
            return [torch.zeros_like(radius) for radius in radii]
        # a condition beside values has no part in the output's radius
        gradients = torch.autograd.grad(weight, radii, allow_unused=True, materialize_grads=True)
        return [gradient * radius.detach() for gradient, radius in zip(gradients, radii, strict=True)]


def _loss(relaxed: Relaxation, coefficients: Tensor, z: Tensor, value: Tensor) -> Tensor:
    """Return ``coefficients·f(z)`` less the line that bounds it from below."""
    low, high = relaxed.lower_slope * z, relaxed.upper_slope * z
    low = low if relaxed.lower_intercept is None else low + relaxed.lower_intercept
    high = high if relaxed.upper_intercept is None else high + relaxed.upper_intercept
    return coefficients * value - coefficients.clamp(min=0) * low - coefficients.clamp(max=0) * high
