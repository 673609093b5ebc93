"""CROWN whose bounds hold in real arithmetic, as a method like the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from service.bounds.effort import Effort, affordable
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.plain import Pass
from service.bounds.linear.propagation import InitialRows
from service.bounds.linear.rigorous import RigorousPass
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.memory import in_parts
from service.bounds.network import Network
from service.bounds.operators import LINEAR, NONLINEAR, OPERATORS
from service.bounds.operators.allowance import Step
from service.bounds.rigorous.optimised import Climbed

Bounding = Callable[[RigorousPass, str, InitialRows], Tensor]
"""``(pass, node, rows)`` to rigorous lower bounds ``(batch, rows)`` of rows of the node's value."""


@dataclass(frozen=True, eq=False)
class RigorousAnalysis:
    """A network on a batch of boxes; ``walk`` has all of it, ``bounding`` answers. ``inputs`` hold rigorously too."""

    walk: RigorousPass
    effort: Effort
    bounding: Bounding

    @property
    def inputs(self) -> Mapping[str, tuple[Interval, ...]]:
        known = self.walk.intervals
        return {node.name: tuple(known[name] for name in node.inputs) for node in self.walk.network.nonlinear}

    @property
    def backward(self) -> Pass:
        """The plain pass on the same intervals, on which relaxations are optimised."""
        return self.walk.plain

    def lower_bounds(self, rows: Tensor) -> Tensor:
        """Lower bounds ``(batch, rows)`` of ``rows · output`` over the reals, for exact float64 rows."""
        network = self.walk.network
        output, batch = network.graph.output.name, len(self.walk.intervals[network.graph.input.name].lower)
        at_once = _rows_at_once(network, output, batch, self.effort)

        def bounds(part: slice) -> Tensor:
            found = self.bounding(self.walk, output, rows[:, part])
            if self.effort.progress is not None:
                self.effort.progress.add(output, found.shape[1], rows.device)
            return found

        with torch.no_grad(), plain_convolutions():
            found = in_parts(rows.shape[1], at_once, bounds, rows.device, alone=network.is_alone)
            return torch.cat(found, dim=1)

    def planes(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Coefficients ``(batch, rows, features)`` and constants ``(batch, rows)`` of affine functions of the model's
        input below ``rows · output``, whose rows may come flattened.
        """
        output = self.walk.network.graph.output
        with torch.no_grad(), plain_convolutions():
            return self.walk.planes(output.name, rows.reshape(*rows.shape[:2], *output.shape))


def rigorous_ibp(network: Network, box: Interval, effort: Effort) -> RigorousAnalysis:
    """Interval bounds; the last linear layers are merged with the rows asked for. See :func:`rigorous_crown`."""
    analysis = _analysed(network, box, effort, RigorousPass.lower_bounds, frozenset())
    frontier = frozenset(node.name for node in network.nonlinear)
    return replace(analysis, walk=replace(analysis.walk, frontier=frontier))


def rigorous_crown_ibp(network: Network, box: Interval, effort: Effort) -> RigorousAnalysis:
    """Intermediate bounds by intervals, the output by one backward pass. See :func:`rigorous_crown`."""
    return _analysed(network, box, effort, RigorousPass.lower_bounds, frozenset())


def rigorous_crown(
    network: Network, box: Interval, effort: Effort, within: Mapping[str, tuple[Interval, ...]] | None = None
) -> RigorousAnalysis:
    """CROWN with every rounding accounted for.

    What is bounded is the function over the reals that the graph's constants, taken as exact float64 numbers, define;
    constants that a capture folded (the scale of a batch norm) are exact as folded. The box's ends are exact too.
    All intermediate bounds are found anew, in float64: none is taken over from another method. ``within`` confines
    the inputs of non-linear nodes, by name, to the part of the box where they hold: a branch of a search, not a claim.
    Of a network that is divided over ranks, sums over the ranks are accounted for too; all ranks call it.

    Raises ``ValueError`` for a box of another type.
    """
    return _analysed(network, box, effort, RigorousPass.lower_bounds, _relaxed(network), within=within)


def rigorous_alpha_crown(network: Network, box: Interval, effort: Effort) -> RigorousAnalysis:
    """α-CROWN with every rounding accounted for, intermediate bounds optimised too; see :func:`rigorous_crown`.

    Each part of the rows is optimised as usual and bounded once more, rigorously, through the lines that were found.
    """
    effort = _smaller(affordable(network, box, effort))
    return _analysed(network, box, effort, Climbed(effort.ascent), _relaxed(network))


def rigorous_alpha_crown_fixed(network: Network, box: Interval, effort: Effort) -> RigorousAnalysis:
    """Intermediate bounds are CROWN's; only the rows asked for are optimised."""
    analysis = rigorous_crown(network, box, effort)
    return replace(analysis, effort=_smaller(analysis.effort), bounding=Climbed(effort.ascent))


def rigorous_lower_bounds(network: Network, box: Interval, rows: Tensor, effort: Effort | None = None) -> Tensor:
    """Lower bounds ``(batch, rows)`` of ``rows · output`` that hold in real arithmetic, see :func:`rigorous_crown`."""
    return rigorous_crown(network, box, effort or Effort()).lower_bounds(rows)


def _check(box: Interval) -> None:
    if box.lower.dtype != torch.float64 or box.upper.dtype != torch.float64:
        raise ValueError(f"rigorous bounds need a float64 network and box, got a box of {box.lower.dtype}")


def _smaller(effort: Effort) -> Effort:
    """Each row has lines of its own, found by bisecting all pieces at once: many tensors for one of coefficients."""
    return replace(effort, elements=max(1, effort.elements // 128))


def _relaxed(network: Network) -> frozenset[str]:
    """The values that non-linear nodes read."""
    return frozenset(name for node in network.nonlinear for name in node.inputs)


def _of_a_ball(network: Network, box: Interval) -> frozenset[str]:
    """Of them, those that only linear operators lead to, where the box around the input would lose something."""
    return frozenset(network.nonlinear[0].inputs) if network.nonlinear and not box.exact_layers else frozenset()


@torch.no_grad()
def _analysed(
    network: Network,
    box: Interval,
    effort: Effort,
    bounding: Bounding,
    linear: frozenset[str],
    *,
    within: Mapping[str, tuple[Interval, ...]] | None = None,
) -> RigorousAnalysis:
    """``linear`` are the values that get linear bounds where these matter, by ``bounding``, beside their intervals."""
    _check(box)
    effort = affordable(network, box, effort)
    intervals = {network.graph.input.name: box}
    steps: dict[str, Step] = {}
    walk = RigorousPass(network, intervals, steps)
    of_a_ball = _of_a_ball(network, box) - linear
    if effort.progress is not None:
        effort.progress.start(network, linear | of_a_ball)
    # What the stages before give has only been propagated, by each rank for itself.
    given = {network.graph.input.name} if network.before is None else set()
    left, met = set(linear) - given, set(given)
    for node in network.graph.nodes[1:]:
        nonlinear = NONLINEAR.get(node.operator)
        if nonlinear is not None:
            branch = within.get(node.name) if within else None
            for index, name in enumerate(node.inputs):
                if name not in met:
                    met.add(name)
                    intervals[name] = network.agreed(name, intervals[name])
                if name in left:
                    left.remove(name)
                    with plain_convolutions():
                        intervals[name] = _refined(walk, bounding, node, index, effort, branch=branch)
                if branch is not None:
                    intervals[name] = _confined(intervals[name], branch[index])
            bounds = [intervals[name] for name in node.inputs]
            steps[node.name] = nonlinear.rigorous_step(node, bounds, nonlinear.relax_on(node, bounds))
        else:
            bounds = [intervals[name] for name in node.inputs]
            steps[node.name] = LINEAR[node.operator].rigorous_step(node, bounds, network.exchange)
        with plain_convolutions():
            intervals[node.name] = OPERATORS[node.operator].rigorous_interval(node, bounds, network.exchange)
            if node.name in of_a_ball:
                everything = torch.ones(len(box.lower), node.size, dtype=torch.bool, device=box.lower.device)
                intervals[node.name] = _bounded(walk, bounding, node.name, everything, effort)
    return RigorousAnalysis(walk, effort, bounding)


def _confined(found: Interval, branch: Interval) -> Interval:
    """Where the two have nothing in common the branch is empty and any bounds hold: it keeps its own."""
    met = Interval(torch.maximum(found.lower, branch.lower.double()), torch.minimum(found.upper, branch.upper.double()))
    empty = met.lower > met.upper
    return Interval(torch.where(empty, found.lower, met.lower), torch.where(empty, found.upper, met.upper))


def _refined(
    walk: RigorousPass,
    bounding: Bounding,
    node: Node,
    index: int,
    effort: Effort,
    *,
    branch: Sequence[Interval] | None,
) -> Interval:
    """Rigorous linear bounds of an input of ``node`` where they matter in the branch, met with its interval."""
    name = node.inputs[index]
    known = [walk.intervals[each] for each in node.inputs]
    if branch is not None:
        known = [_confined(each, own) for each, own in zip(known, branch, strict=True)]
    wanted = walk.network.operator_of(node).improvable_on(node, known)[index].flatten(1)
    return _bounded(walk, bounding, name, wanted, effort)


def _bounded(walk: RigorousPass, bounding: Bounding, name: str, wanted: Tensor, effort: Effort) -> Interval:
    """The interval of a value, met with linear bounds of the entries ``wanted``, bool ``(batch, n)``.

    Rows are those that any instance wants. One that does not keeps its interval, so that its bounds are the same
    whatever other instances it is bounded with.
    """
    before, network = walk.intervals[name], walk.network
    chosen = wanted.any(dim=0).nonzero().squeeze(1)
    lower, upper = before.lower.flatten(1).clone(), before.upper.flatten(1).clone()
    if network.is_own(name):
        # As many on each rank.
        missing = network.exchange.largest(len(chosen), chosen.device) - len(chosen)
        chosen = torch.cat([chosen, chosen.new_zeros(missing)])
    pairs = max(1, _rows_at_once(network, name, len(lower), effort) // 2)
    if effort.progress is not None:
        effort.progress.expect(name, 2 * len(chosen))

    def refine(rows: slice) -> None:
        part = chosen[rows]
        bounds, own = bounding(walk, name, IdentityRows(part.unsqueeze(0))), wanted[:, part]
        low, high = lower[:, part], upper[:, part]
        lower[:, part] = torch.where(own, torch.maximum(low, bounds[:, : len(part)]), low)
        upper[:, part] = torch.where(own, torch.minimum(high, -bounds[:, len(part) :]), high)
        if effort.progress is not None:
            effort.progress.add(name, 2 * len(part), part.device)

    in_parts(len(chosen), pairs, refine, lower.device, alone=network.is_alone)
    return Interval(lower.view_as(before.lower), upper.view_as(before.upper))


def _rows_at_once(network: Network, start: str, batch: int, effort: Effort) -> int:
    """Of each rank. Rows are whole here: patches would need allowances of their own."""
    before = 0 if network.before is None else network.before.entries
    return max(1, effort.passing(0).elements // (batch * max(network.widest * network.shares(start), before)))


def plain_convolutions() -> AbstractContextManager[None]:
    """Without cuDNN, some of whose convolutions go through transforms that round in another way."""
    return torch.backends.cudnn.flags(enabled=False)
