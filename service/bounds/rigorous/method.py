"""CROWN whose bounds hold in real arithmetic, as a method like the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.methods.base import Effort
from service.bounds.network import Network
from service.bounds.rigorous.backward import RigorousPass
from service.bounds.rigorous.optimised import Climbed
from service.bounds.rigorous.steps import Step, interval, linear_step, nonlinear_step, refuse_unknown
from service.bounds.rules import RULES
from service.bounds.rules.base import Coefficients, RelaxedRule, UnitRows

Bounding = Callable[[RigorousPass, str, Coefficients], Tensor]
"""``(pass, node, rows)`` to rigorous lower bounds ``(batch, rows)`` of rows of the node's value."""


@dataclass(frozen=True, eq=False)
class RigorousAnalysis:
    """A network on a batch of boxes. ``inputs`` hold rigorously too."""

    network: Network
    intervals: Mapping[str, Interval]
    steps: Mapping[str, Step]
    effort: Effort
    bounding: Bounding

    @property
    def inputs(self) -> Mapping[str, tuple[Interval, ...]]:
        return {node.name: tuple(self.intervals[name] for name in node.inputs) for node in self.network.nonlinear}

    def lower_bounds(self, rows: Tensor) -> Tensor:
        """Lower bounds ``(batch, rows)`` of ``rows · output`` over the reals, for exact float64 rows."""
        output, batch = self.network.graph.output.name, len(self.intervals[self.network.graph.input.name].lower)
        walk = RigorousPass(self.network, self.intervals, self.steps)
        parts = torch.split(rows, _rows_at_once(self.network, batch, self.effort), dim=1)
        with torch.no_grad(), _plain_convolutions():
            return torch.cat([self.bounding(walk, output, part) for part in parts], dim=1)


def rigorous_crown(
    network: Network, box: Interval, effort: Effort, within: Mapping[str, tuple[Interval, ...]] | None = None
) -> RigorousAnalysis:
    """CROWN with every rounding accounted for.

    What is bounded is the function over the reals that the graph's constants, taken as exact float64 numbers, define;
    constants that a capture folded (the scale of a batch norm) are exact as folded. The box's ends are exact too.
    All intermediate bounds are found anew, in float64: none is taken over from another method. ``within`` confines
    the inputs of non-linear nodes, by name, to the part of the box where they hold: a branch of a search, not a claim.

    Raises ``ValueError`` for a box of another type or a network on several ranks,
    :class:`~service.bounds.graph.UnsupportedModelError` for an operator whose rounding is not known.
    """
    _check(network, box)
    with torch.no_grad(), _plain_convolutions():
        return _analyse(network, box, effort, RigorousPass.lower_bounds, within or {})


def rigorous_alpha_crown(network: Network, box: Interval, effort: Effort) -> RigorousAnalysis:
    """α-CROWN with every rounding accounted for, intermediate bounds optimised too; see :func:`rigorous_crown`.

    Each part of the rows is optimised as usual and bounded once more, rigorously, through the lines that were found.
    """
    _check(network, box)
    with torch.no_grad(), _plain_convolutions():
        # Each row has lines of its own, found by bisecting all pieces at once: many tensors for one of coefficients.
        smaller = replace(effort, elements=max(1, effort.elements // 32))
        return _analyse(network, box, smaller, Climbed(effort.ascent), {})


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
    network: Network, box: Interval, effort: Effort, bounding: Bounding, within: Mapping[str, tuple[Interval, ...]]
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
                    intervals[name] = _refined(walk, bounding, node, index, effort)
                if node.name in within:
                    intervals[name] = _confined(intervals[name], within[node.name][index])
            bounds = [intervals[name] for name in node.inputs]
            steps[node.name] = nonlinear_step(node, bounds, rule.relax_on(node, bounds))
        else:
            steps[node.name] = linear_step(node, [intervals[name] for name in node.inputs])
        intervals[node.name] = interval(node, [intervals[name] for name in node.inputs])
    return RigorousAnalysis(network, intervals, steps, effort, bounding)


def _confined(found: Interval, branch: Interval) -> Interval:
    """Where the two have nothing in common the branch is empty and any bounds hold: it keeps its own."""
    met = Interval(torch.maximum(found.lower, branch.lower.double()), torch.minimum(found.upper, branch.upper.double()))
    empty = met.lower > met.upper
    return Interval(torch.where(empty, found.lower, met.lower), torch.where(empty, found.upper, met.upper))


def _refined(walk: RigorousPass, bounding: Bounding, node: Node, index: int, effort: Effort) -> Interval:
    """Rigorous linear bounds of an input of ``node`` where they matter, met with its interval."""
    name = node.inputs[index]
    before = walk.intervals[name]
    known = [walk.intervals[each] for each in node.inputs]
    wanted = walk.network.rule_of(node).improvable_on(node, known)[index].flatten(1).any(dim=0)
    chosen = wanted.nonzero().squeeze(1)
    if not len(chosen):
        return before
    lower, upper = before.lower.flatten(1).clone(), before.upper.flatten(1).clone()
    pairs = max(1, _rows_at_once(walk.network, len(lower), effort) // 2)
    for part in torch.split(chosen, pairs):
        bounds = bounding(walk, name, UnitRows(part.unsqueeze(0)))
        lower[:, part] = torch.maximum(lower[:, part], bounds[:, : len(part)])
        upper[:, part] = torch.minimum(upper[:, part], -bounds[:, len(part) :])
    return Interval(lower.view_as(before.lower), upper.view_as(before.upper))


def _rows_at_once(network: Network, batch: int, effort: Effort) -> int:
    """Rows are whole here: windows would need allowances of their own."""
    return max(1, effort.elements // (batch * network.widest))


def _plain_convolutions() -> AbstractContextManager[None]:
    """Without cuDNN, some of whose convolutions go through transforms that round in another way."""
    return torch.backends.cudnn.flags(enabled=False)
