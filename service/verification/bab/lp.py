"""Decides domains in which every operator is affine as linear programs (HiGHS), in float64.

The solver is not trusted: its multipliers give a bound in closed form, as in β-CROWN, which holds for any
multipliers; and its point is a counterexample only if the model agrees. A margin allows for the rounding of the model's
own type, like those of all bounds: in float64, a program would prove what the model itself may violate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.bounds.capture import capture
from service.bounds.interval import Interval
from service.bounds.network import Network, from_graph
from service.bounds.operators import OPERATORS
from service.bounds.shard import shard
from service.bounds.split import Preactivations
from service.verification.bab.activations.domains import Domains
from service.verification.bab.activations.neuron_index import NeuronIndex
from service.verification.bab.model import ModelUnderVerification
from service.verification.bab.specification import Specification
from service.verification.verdict import RELATIVE_MARGIN

Array = NDArray[np.float64]
INPUT_COPIES, VALUE_COPIES = 5, 2
"""How many tensors like the input, and like all of the network's values, are held for each input that varies."""


@dataclass(frozen=True)
class LpResult:
    """``margin`` is proved, −inf if nothing is; ``counterexample`` was confirmed by the model."""

    margin: float
    counterexample: tuple[float, ...] | None = None


@dataclass(frozen=True, eq=False)
class _AffineMap:
    """``matrix·t + constant`` for t in [−1, 1]."""

    matrix: Array
    constant: Array

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.matrix).all() and np.isfinite(self.constant).all())

    def least(self, weights: Array) -> float:
        """Return the least value of a combination of the entries, less the possible rounding error."""
        # Over the cube a linear function is least at a corner, where it is the constant less the sizes of all slopes.
        slopes, constant = weights @ self.matrix, float(weights @ self.constant)
        size = float(weights @ (np.abs(self.matrix).sum(axis=1) + np.abs(self.constant)))
        return constant - float(np.abs(slopes).sum()) - RELATIVE_MARGIN[torch.float64] * size


class LinearPrograms:
    """Solves the domains of one specification as linear programs."""

    def __init__(self, model: ModelUnderVerification, specification: Specification) -> None:
        self.model, self.specification = model, specification

    @cached_property
    def network(self) -> Network:
        """Return the same graph in float64, divided over the same ranks."""
        network, axis = self.model.network, self.model.network.tp_group.axis
        graph = capture(self.model.float64_module, network.graph.input.shape)
        divided = any(OPERATORS[node.operator].crossing is not None for node in graph.nodes[1:])
        # The graph was divided even if the module itself is not.
        return from_graph(graph if divided else shard(graph, axis), axis)

    @property
    def applies(self) -> bool:
        """Return whether the model is piecewise linear and not in stages, where no rank has the whole matrix."""
        network = self.model.network
        piecewise_linear = all(network.operator_of(node).breakpoint(node, 0) is not None for node in network.nonlinear)
        return piecewise_linear and self.model.engine.stages is None

    def solve(self, domain: Domains, bounds: Interval) -> LpResult:
        """Solve one domain whose splits leave only affine operators, given the root's bounds of all preactivations."""
        numbers = torch.arange(self.specification.disjunct_count, device=domain.disjunct.device)
        asked = self.specification.of_disjuncts(numbers == domain.disjunct)
        values = self._values(domain, bounds)
        output = values[self.network.graph.output.name] @ asked.rows.T
        if asked.input_rows is not None:
            output = output + values[self.network.graph.input.name] @ asked.input_rows.T
        reach = (output[1:] - output[0]).abs().sum(dim=0)
        output = output - asked.offsets(*(end.to(self.model.dtype) for end in (output[0] - reach, output[0] + reach)))
        is_split = domain.sign[0] != 0
        number, sign = domain.index[:, is_split], domain.sign[:, is_split]
        splits = self._neuron_index.localise(number, sign)
        # An entry that is neither split nor stable has two pieces, and the program would have only one of them.
        if bool(self._neuron_index.anywhere(self._has_unstable(bounds, splits.index[splits.here]))):
            return LpResult(-inf)
        hidden = torch.cat(
            [values[preactivation.value] for preactivation in Preactivations.of(self.network).each], dim=1
        )
        # A program has constraints that are at most 0: the split z ≥ 0 is −z ≤ 0.
        sides = -sign.double() * self._neuron_index.total(number, hidden[:, splits.index[0]])
        agree = self.network.tp_group.agree
        return self._confirm_margin(*_solve(_affine(agree(output)), _affine(agree(sides))))

    def _confirm_margin(self, margin: float, t: Array | None) -> LpResult:
        """Return the result of the first rank's solver on all ranks; its point counts if the model confirms it."""
        tp_group, count = self.network.tp_group, len(self._varying)
        # Solvers may end at different corners for the last bit of their numbers, and ranks must decide alike.
        solution = np.concatenate([[margin, t is not None], np.zeros(count) if t is None else t])
        margin, has_point, *point = tp_group.agree(torch.from_numpy(solution).to(self.model.device)).tolist()
        if not has_point:
            return LpResult(margin)
        found = torch.tensor([point], dtype=torch.float64, device=self.model.device)
        return LpResult(margin, self.model.first_confirmed(self.specification, self._inputs(found)))

    @cached_property
    def _neuron_index(self) -> NeuronIndex:
        return NeuronIndex.of(self.network, Preactivations.of(self.network), self.model.device)

    @cached_property
    def _varying(self) -> Tensor:
        """Return the inputs that vary, ``(varying inputs,)``."""
        return (self.specification.upper > self.specification.lower).nonzero().squeeze(1)

    def _inputs(self, t: Tensor) -> Tensor:
        """Return points ``(n, varying inputs)`` of [−1, 1], on the device, as inputs ``(n, features)``."""
        centre, radius = (
            (self.specification.lower + self.specification.upper) / 2,
            (self.specification.upper - self.specification.lower) / 2,
        )
        x = centre.expand(len(t), -1).clone()
        x[:, self._varying] += t * radius[self._varying]
        return x

    def _values(self, domain: Domains, bounds: Interval) -> Mapping[str, Tensor]:
        """Return every node's value ``(1 + varying inputs, size)``: at the centre, and one unit along each input."""
        nodes, device, count = self.network.graph.nodes, self.model.device, len(self._varying)
        numbers = (count + 1) * (INPUT_COPIES * nodes[0].size + VALUE_COPIES * sum(node.size for node in nodes))
        self.model.memory.plan(device, 8 * numbers, 1, least=self.model.engine.least)
        # On the chosen pieces every value is affine in the input, and an affine map is known by these points.
        t = torch.eye(count + 1, count, dtype=torch.float64, device=device).roll(1, dims=0)
        x = self._inputs(t).reshape(len(t), *self.network.graph.input.shape)
        known = {self.network.graph.input.name: Interval.point(x)}
        sides = self._sides(domain, bounds)
        for node in self.network.graph.nodes[1:]:
            if node.name in sides:
                inputs = [known[name].lower for name in node.inputs]
                known[node.name] = Interval.point(self.network.operator_of(node).piece(node, inputs, sides[node.name]))
            else:
                known[node.name] = Interval.point(self.network.interval(node, known).centre)
        return {name: each.lower.flatten(1) for name, each in known.items()}

    @staticmethod
    def _has_unstable(bounds: Interval, split: Tensor) -> Tensor:
        """Return whether an unstable entry is not ``split``, ``(1,)``."""
        unstable = (bounds.lower < 0) & (bounds.upper > 0)
        return unstable.index_fill(1, split, False).any(dim=1)

    def _sides(self, domain: Domains, bounds: Interval) -> dict[str, Tensor]:
        """Return, by non-linear node, whether the value selecting its piece is above 0 in a domain, ``(1, *shape)``."""
        preactivations = Preactivations.of(self.network)
        splits = self._neuron_index.localise(domain.index, domain.sign)
        positive = (bounds.lower >= 0).scatter(1, splits.index[splits.sign > 0][None], True)
        above = preactivations.unflattened(positive.scatter(1, splits.index[splits.sign < 0][None], False))
        return {node.name: above[node.inputs[0]] for node in self.network.nonlinear}


def _solve(objectives: _AffineMap, constraints: _AffineMap) -> tuple[float, Array | None]:
    """Return the proved margin, −inf if nothing is proved, and otherwise the solver's minimiser."""
    if not (objectives.is_finite and constraints.is_finite):  # the solver takes no numbers that overflowed
        return -inf, None
    result = _program(objectives, constraints)
    if result.status == 0:
        weights, multipliers = _duals(result, len(objectives.constant))
        both = _AffineMap(
            np.concatenate([objectives.matrix, constraints.matrix]),
            np.concatenate([objectives.constant, constraints.constant]),
        )
        margin = both.least(np.concatenate([weights, multipliers]))
        return margin, None if margin > 0 else result.x[:-1]
    # Without a solution the splits may contradict each other: that is proved by a combination of the constraints that
    # is above 0 everywhere, although each of them is at most 0.
    empty = _program(constraints, None)
    if empty.status == 0:
        weights, _ = _duals(empty, len(constraints.constant))
        if constraints.least(weights) > 0:
            return inf, None
    return -inf, None


def _affine(values: Tensor) -> _AffineMap:
    """Return the affine map through values at the centre and one unit along each input, ``(1 + inputs, entries)``."""
    array = values.cpu().numpy()
    return _AffineMap((array[1:] - array[0]).T, array[0])


def _program(objectives: _AffineMap, constraints: _AffineMap | None):  # type: ignore[no-untyped-def]
    """Minimise the largest objective where all constraints are at most 0. Variables are t and that maximum."""
    inputs = objectives.matrix.shape[1]
    above = np.hstack([objectives.matrix, -np.ones((len(objectives.constant), 1))])
    limits = -objectives.constant
    if constraints is not None:
        above = np.vstack([above, np.hstack([constraints.matrix, np.zeros((len(constraints.constant), 1))])])
        limits = np.concatenate([limits, -constraints.constant])
    from scipy.optimize import linprog  # noqa: PLC0415 - its import takes as long as a small search

    cost = np.concatenate([np.zeros(inputs), np.ones(1)])
    return linprog(cost, A_ub=above, b_ub=limits, bounds=[(-1, 1)] * inputs + [(None, None)], method="highs")


def _duals(result, objectives: int) -> tuple[Array, Array]:  # type: ignore[no-untyped-def]
    """Return weights of the objectives that sum to 1, and multipliers of the constraints."""
    # The cost falls as a limit rises, so HiGHS gives no marginal above 0, but for rounding.
    multipliers = np.maximum(-np.asarray(result.ineqlin.marginals), 0)
    total = multipliers[:objectives].sum()
    # Any weights prove a bound: if the solver names no objective that holds the maximum, all count alike.
    if total <= 0:
        return np.full(objectives, 1 / objectives), np.zeros(len(multipliers) - objectives)
    return multipliers[:objectives] / total, multipliers[objectives:] / total
