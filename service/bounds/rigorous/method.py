"""CROWN with bounds that hold in real arithmetic, as a method like the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from service.bounds.flat import by_instance
from service.bounds.forward import LayerArithmetic, LayerSweep, values_of_a_ball
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.linear.propagation import InitialRows
from service.bounds.linear.rigorous import RigorousPass
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.memory import in_parts
from service.bounds.network import Network
from service.bounds.operators import LINEAR, NONLINEAR, OPERATORS
from service.bounds.optimise import Ascent, Families, RowOptimiser, SlopeOptimiser
from service.bounds.options import BoundOptions, affordable
from service.bounds.relaxation import RigorousStep

Bounding = Callable[[RigorousPass, str, InitialRows], Tensor]
"""``(pass, node, rows)`` to rigorous lower bounds ``(batch, rows)`` of rows of the node's value."""


@dataclass(frozen=True, eq=False)
class RigorousAnalysis:
    """A network on a batch of boxes, whose bounds all hold in real arithmetic.

    ``backward`` has the intervals and the steps of all nodes; ``bounding`` bounds rows through these.
    """

    backward: RigorousPass
    options: BoundOptions
    bounding: Bounding

    @property
    def inputs(self) -> Mapping[str, tuple[Interval, ...]]:
        known = self.backward.intervals
        return {node.name: tuple(known[name] for name in node.inputs) for node in self.backward.network.nonlinear}

    def lower_bounds(self, rows: Tensor) -> Tensor:
        """Return lower bounds ``(batch, rows)`` of ``rows · output`` over the reals, for exact float64 rows."""
        network = self.backward.network
        output, batch = network.graph.output.name, len(self.backward.intervals[network.graph.input.name].lower)
        at_once = _rows_at_once(network, output, batch, self.options)
        by_interval = replace(self.backward, frontier=frozenset({output}))

        def bounds(part: slice) -> Tensor:
            found = self.bounding(self.backward, output, rows[:, part])
            if self.options.intersect and not network.is_own(output):
                found = torch.maximum(found, by_interval.lower_bounds(output, rows[:, part]))
            if self.options.progress is not None:
                self.options.progress.add(output, found.shape[1], rows.device)
            return found

        with torch.no_grad(), plain_convolutions():
            found = in_parts(rows.shape[1], at_once, bounds, rows.device, alone=network.is_alone)
            return torch.cat(found, dim=1)

    def planes(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return coefficients ``(batch, rows, features)`` and constants ``(batch, rows)`` of affine functions
        of the model's input below ``rows · output``; rows may come flattened.
        """
        output = self.backward.network.graph.output
        with torch.no_grad(), plain_convolutions():
            return self.backward.planes(output.name, rows.reshape(*rows.shape[:2], *output.shape))


def rigorous_ibp(network: Network, box: Interval, options: BoundOptions) -> RigorousAnalysis:
    """Bound by intervals; the last linear layers are merged with the requested rows. See :func:`rigorous_crown`."""
    analysis = _analysed(network, box, options, RigorousPass.lower_bounds, frozenset())
    frontier = frozenset(node.name for node in network.nonlinear)
    return replace(analysis, backward=replace(analysis.backward, frontier=frontier))


def rigorous_crown_ibp(network: Network, box: Interval, options: BoundOptions) -> RigorousAnalysis:
    """Bound intermediate values by intervals, the output by one backward pass. See :func:`rigorous_crown`."""
    return _analysed(network, box, options, RigorousPass.lower_bounds, frozenset())


def rigorous_crown(network: Network, box: Interval, options: BoundOptions) -> RigorousAnalysis:
    """Bound by CROWN with every rounding accounted for.

    The bounded function is that of the graph's constants over the reals, taken as exact float64 numbers;
    constants that a capture folded (such as the scale of a batch norm) are exact as folded. The box's ends are
    exact too. All intermediate
    bounds are computed in float64, none by another method. Sums over the ranks of a divided network are accounted for
    too; all ranks call it.

    Raises ``ValueError`` for a box of another type.
    """
    return _analysed(network, box, options, RigorousPass.lower_bounds, network.preactivations)


def rigorous_alpha_crown(network: Network, box: Interval, options: BoundOptions) -> RigorousAnalysis:
    """Bound by α-CROWN with every rounding accounted for and intermediate bounds optimised; see :func:`rigorous_crown`.

    Each part of the rows is optimised as usual and bounded once more, rigorously, through the lines found.
    """
    options = _smaller(affordable(network, box, options))
    return _analysed(network, box, options, OptimisedLowerBounds(options.ascent), network.preactivations)


def rigorous_alpha_crown_fixed(network: Network, box: Interval, options: BoundOptions) -> RigorousAnalysis:
    """Bound intermediate values by CROWN; only the requested rows are optimised."""
    analysis = rigorous_crown(network, box, options)
    return replace(analysis, options=_smaller(analysis.options), bounding=OptimisedLowerBounds(options.ascent))


def _check(box: Interval) -> None:
    if box.lower.dtype != torch.float64 or box.upper.dtype != torch.float64:
        raise ValueError(f"rigorous bounds need a float64 network and box, got a box of {box.lower.dtype}")


def _smaller(options: BoundOptions) -> BoundOptions:
    """Return fewer elements: each row has lines of its own, found by bisecting all pieces at once, in many tensors."""
    return replace(options, elements=max(1, options.elements // 128))


@torch.no_grad()
def _analysed(
    network: Network, box: Interval, options: BoundOptions, bounding: Bounding, linear: frozenset[str]
) -> RigorousAnalysis:
    """Analyse a box; the values ``linear`` get linear bounds, by ``bounding``, beside intervals if these matter."""
    _check(box)
    options, first = affordable(network, box, options), network.graph.input.name
    # The model's own input has no better bounds; those from previous stages have only been propagated.
    linear -= {first} if network.before is None else set()
    ball_values = values_of_a_ball(network, box) - linear
    if options.progress is not None:
        options.progress.start(network, linear | ball_values)
    intervals, steps = {first: box}, dict[str, RigorousStep]()
    backward = RigorousPass(network, intervals, steps)
    arithmetic = _RigorousLayers(backward, intervals, steps, options, bounding)
    LayerSweep(network, intervals, arithmetic, linear, ball_values, progress=options.progress).run()
    return RigorousAnalysis(backward, options, bounding)


@dataclass(eq=False)
class _RigorousLayers(LayerArithmetic):
    """Rows of ``backward``, by ``bounding``, over the reals; every node gets a step of its own.

    All instances have the same rows: those that any of them wants.
    """

    backward: RigorousPass
    intervals: dict[str, Interval]
    steps: dict[str, RigorousStep]
    options: BoundOptions
    bounding: Bounding

    @property
    def network(self) -> Network:
        return self.backward.network

    def _bounds_of_inputs(self, node: Node) -> list[Interval]:
        return [self.intervals[name] for name in node.inputs]

    def interval(self, node: Node) -> Interval:
        bounds, tp_group = self._bounds_of_inputs(node), self.network.tp_group
        if node.operator in LINEAR:
            self.steps[node.name] = LINEAR[node.operator].rigorous_step(node, bounds, tp_group)
        with plain_convolutions():
            interval = OPERATORS[node.operator].rigorous_interval(node, bounds, tp_group)
        return interval.meet(self.network.narrowed(node, interval, self.intervals))

    def relax(self, node: Node, bounds: Sequence[Interval]) -> None:
        operator = self.network.operator_of(node)
        self.steps[node.name] = operator.rigorous_step(node, bounds, operator.relax_on(node, bounds))

    def wanted_rows(self, node: Node, index: int) -> tuple[Tensor, Tensor]:
        bounds = self._bounds_of_inputs(node)
        wanted = by_instance(self.network.operator_of(node).unstable_on(node, bounds)[index])
        chosen = wanted.any(dim=0).nonzero().squeeze(1)
        if self.network.is_own(node.inputs[index]):
            # As many on each rank.
            missing = self.network.tp_group.largest(len(chosen), chosen.device) - len(chosen)
            chosen = torch.cat([chosen, chosen.new_zeros(missing)])
        return wanted, chosen.unsqueeze(0)

    def bounds_of_entries(self, name: str, index: Tensor) -> Interval:
        network, progress = self.network, self.options.progress
        pairs = max(1, _rows_at_once(network, name, len(self.backward.like), self.options) // 2)

        def bounds(part: slice) -> Tensor:
            found = self.bounding(self.backward, name, IdentityRows(index[:, part]))
            if progress is not None:
                progress.add(name, found.shape[1], found.device)
            return found

        with plain_convolutions():
            parts = in_parts(index.shape[1], pairs, bounds, index.device, alone=network.is_alone)
        halves = [each.chunk(2, dim=1) for each in parts]
        return Interval(torch.cat([low for low, _ in halves], dim=1), -torch.cat([high for _, high in halves], dim=1))


def _rows_at_once(network: Network, start: str, batch: int, options: BoundOptions) -> int:
    """Return how many rows of each rank go together. They are dense: patches would need allowances of their own."""
    before = 0 if network.before is None else network.before.entries
    return max(1, options.passing(0) // (batch * max(network.widest * network.shares(start), before)))


def plain_convolutions() -> AbstractContextManager[None]:
    """Compute without cuDNN: some of its convolutions go through transforms that round in another way."""
    return torch.backends.cudnn.flags(enabled=False)


@dataclass(frozen=True)
class OptimisedLowerBounds:
    """Lower bounds ``(batch, rows)`` of a node: α-CROWN's parameters after ``ascent``, or the plain relaxations."""

    ascent: Ascent

    def __call__(self, backward: RigorousPass, start: str, rows: InitialRows) -> Tensor:
        plain = backward.lower_bounds(start, rows)
        # Dense rows: slopes chosen for patches would have to be moved to their places.
        whole = rows if isinstance(rows, Tensor) else self._whole(backward, start, rows)
        optimiser = RowOptimiser(Families(backward.plain), start, whole, self.ascent)
        optimiser.best_bounds(whole)
        with torch.no_grad():
            # The same rows, shared in the same way by the ranks: each has the choice for its own.
            return torch.maximum(plain, through(backward, optimiser).lower_bounds(start, whole))

    @staticmethod
    def _whole(backward: RigorousPass, start: str, rows: IdentityRows) -> Tensor:
        nodes = backward.network.nodes
        return rows.dense(nodes[start].shape, backward.intervals[backward.network.graph.input.name].lower)


def through(backward: RigorousPass, optimiser: SlopeOptimiser) -> RigorousPass:
    """Return a pass through the chosen relaxations, here and in previous stages."""
    before = backward.network.before
    answer = None if before is None else before.chosen
    return replace(backward, steps={**backward.steps, **_steps(backward, optimiser)}, before=answer)


def _steps(backward: RigorousPass, optimiser: SlopeOptimiser) -> dict[str, RigorousStep]:
    """Return steps of the non-linear nodes with parameters, one relaxation for each row."""
    found = {}
    for name, chosen in optimiser.chosen.items():
        if chosen.parameters:
            node = backward.network.nodes[name]
            inputs = [backward.intervals[each] for each in node.inputs]
            parameters = tuple(each.detach() for each in chosen.parameters)
            member = chosen.family.member(parameters)
            found[name] = NONLINEAR[node.operator].rigorous_step(node, inputs, member, parameters[0].shape[1])
    return found
