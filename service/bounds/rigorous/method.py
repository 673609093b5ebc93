"""CROWN whose bounds hold in real arithmetic, as a method like the others."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.graph import Node, UnsupportedModelError
from service.bounds.interval import Interval
from service.bounds.methods.base import Effort, rows_at_once
from service.bounds.network import Network
from service.bounds.rigorous.backward import RigorousPass
from service.bounds.rigorous.steps import Step, interval, linear_step, nonlinear_step, refuse_unknown
from service.bounds.rules import RULES
from service.bounds.rules.base import RelaxedRule, UnitRows

Parameters = Mapping[str, tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class RigorousAnalysis:
    """A network on a batch of boxes. ``inputs`` hold rigorously too."""

    network: Network
    intervals: Mapping[str, Interval]
    steps: dict[str, Step]
    effort: Effort

    @property
    def inputs(self) -> Mapping[str, tuple[Interval, ...]]:
        return {node.name: self._inputs_of(node) for node in self.network.nonlinear}

    def lower_bounds(self, rows: Tensor) -> Tensor:
        """Lower bounds ``(batch, rows)`` of ``rows · output`` over the reals, for exact float64 rows."""
        return self._bounds(rows, self.steps)

    def lower_bounds_with(self, rows: Tensor, parameters: Parameters) -> Tensor:
        """The same through the relaxations that an optimiser chose: parameters of families, by non-linear node.

        Each ``(batch, rows or 1, *any)``. They only choose the slopes, so nothing about them is trusted; nodes
        without any keep the relaxation of :meth:`lower_bounds`.
        """
        chosen = dict(self.steps)
        for node in self.network.nonlinear:
            if node.name in parameters:
                bounds = self._inputs_of(node)
                values = tuple(value.double().clamp(0, 1) for value in parameters[node.name])
                member = self.network.rule_of(node).family(node, bounds).member(values)
                rows_of = max((value.shape[1] for value in values), default=1)
                chosen[node.name] = nonlinear_step(node, bounds, member, rows_of)
        with _plain_convolutions():
            return RigorousPass(self.network, self.intervals, chosen).lower_bounds(self.network.graph.output.name, rows)

    def _bounds(self, rows: Tensor, steps: Mapping[str, Step]) -> Tensor:
        output, batch = self.network.graph.output.name, len(self.intervals[self.network.graph.input.name].lower)
        walk = RigorousPass(self.network, self.intervals, steps)
        parts = torch.split(rows, rows_at_once(self.network, output, batch, self.effort), dim=1)
        with _plain_convolutions():
            return torch.cat([walk.lower_bounds(output, part) for part in parts], dim=1)

    def _inputs_of(self, node: Node) -> tuple[Interval, ...]:
        return tuple(self.intervals[name] for name in node.inputs)


def rigorous_crown(
    network: Network, box: Interval, effort: Effort, within: Mapping[str, tuple[Interval, ...]] | None = None
) -> RigorousAnalysis:
    """CROWN with every rounding accounted for.

    What is bounded is the function over the reals that the graph's constants, taken as exact float64 numbers, define;
    constants that a capture folded (the scale of a batch norm) are exact as folded. The box's ends are exact too.
    All intermediate bounds are found anew, in float64: none is taken over from another method. ``within`` confines
    the inputs of non-linear nodes, by name, to the part of the box where they hold: a branch of a search, not a claim.

    Raises ``ValueError`` for a box of another type or a network on several ranks, :class:`UnsupportedModelError` for
    an operator whose rounding is not known.
    """
    _check(network, box)
    with torch.no_grad(), _plain_convolutions():
        return _analyse(network, box, effort, within or {})


def rigorous_lower_bounds(network: Network, box: Interval, rows: Tensor, effort: Effort | None = None) -> Tensor:
    """Lower bounds ``(batch, rows)`` of ``rows · output`` that hold in real arithmetic, see :func:`rigorous_crown`."""
    return rigorous_crown(network, box, effort or Effort()).lower_bounds(rows)


def _check(network: Network, box: Interval) -> None:
    if box.lower.dtype != torch.float64 or box.upper.dtype != torch.float64:
        raise ValueError(f"rigorous bounds need a float64 network and box, got a box of {box.lower.dtype}")
    if network.exchange.axis.size != 1:
        raise ValueError(
            f"rigorous bounds run on one rank of a tensor-parallel group, got {network.exchange.axis.size}"
        )
    refuse_unknown(network.graph)


def _analyse(
    network: Network, box: Interval, effort: Effort, within: Mapping[str, tuple[Interval, ...]]
) -> RigorousAnalysis:
    intervals = {network.graph.input.name: box}
    steps: dict[str, Step] = {}
    walk, refined = RigorousPass(network, intervals, steps), {network.graph.input.name}
    for node in network.graph.nodes[1:]:
        rule = RULES[node.operator]
        if isinstance(rule, RelaxedRule):
            for index, name in enumerate(node.inputs):
                if name not in refined:
                    refined.add(name)
                    intervals[name] = _refined(walk, rule, node, index, effort)
                if node.name in within:
                    intervals[name] = _confined(intervals[name], within[node.name][index])
            bounds = [intervals[name] for name in node.inputs]
            steps[node.name] = nonlinear_step(node, bounds, rule.relax_on(node, bounds))
        else:
            steps[node.name] = linear_step(node, [intervals[name] for name in node.inputs])
        intervals[node.name] = interval(node, [intervals[name] for name in node.inputs])
    return RigorousAnalysis(network, intervals, steps, effort)


def _confined(found: Interval, branch: Interval) -> Interval:
    """Where the two have nothing in common the branch is empty and any bounds hold: it keeps its own."""
    met = Interval(torch.maximum(found.lower, branch.lower.double()), torch.minimum(found.upper, branch.upper.double()))
    empty = met.lower > met.upper
    return Interval(torch.where(empty, found.lower, met.lower), torch.where(empty, found.upper, met.upper))


def _refined(walk: RigorousPass, rule: RelaxedRule, node: Node, index: int, effort: Effort) -> Interval:
    """Rigorous linear bounds of an input of ``node`` where they matter, met with its interval."""
    name = node.inputs[index]
    before = walk.intervals[name]
    wanted = rule.improvable_on(node, [walk.intervals[each] for each in node.inputs])[index].flatten(1).any(dim=0)
    chosen = wanted.nonzero().squeeze(1)
    if not len(chosen):
        return before
    lower, upper = before.lower.flatten(1).clone(), before.upper.flatten(1).clone()
    pairs = max(1, rows_at_once(walk.network, name, len(lower), effort) // 2)
    for part in torch.split(chosen, pairs):
        bounds = walk.lower_bounds(name, UnitRows(part.unsqueeze(0)))
        lower[:, part] = torch.maximum(lower[:, part], bounds[:, : len(part)])
        upper[:, part] = torch.minimum(upper[:, part], -bounds[:, len(part) :])
    return Interval(lower.view_as(before.lower), upper.view_as(before.upper))


def _plain_convolutions() -> AbstractContextManager[None]:
    """Without cuDNN, some of whose convolutions go through transforms that round in another way."""
    return torch.backends.cudnn.flags(enabled=False)


__all__ = ["RigorousAnalysis", "UnsupportedModelError", "rigorous_crown", "rigorous_lower_bounds"]
