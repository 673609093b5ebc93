"""Prepares a network for bounding, and finds the entries of its values on which the output depends.

A classifier that reads one token ignores the others after the last attention: bounds of their entries affect no bound
of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from service.bounds.capture import Trace, capture, local_state, trace
from service.bounds.expectations import expectations_of
from service.bounds.finite import tests_of
from service.bounds.graph import Graph, Node, Repeated
from service.bounds.interval import Interval
from service.bounds.operators import ACCUMULATING, COLLECTIVES, LINEAR, NONLINEAR, OPERATORS, check
from service.bounds.operators.base import AccumulatingOperator, Collective, LinearOperator, NonlinearOperator, Operator
from service.bounds.placement import Placement, check_constants, entered, entering, place, place_part
from service.bounds.ranges import Range, ranges_of
from service.bounds.rank_group import RankGroup
from service.parallel.mesh import SINGLE, Axis

ALONE = RankGroup()
P = ParamSpec("P")
T = TypeVar("T")
DRAWS = 2
"""The number of random rows that go backward: an entry that matters is missed only if it cancels to 0 in all of them.
"""


@torch.no_grad()
def _needed_entries(graph: Graph, tp_group: RankGroup = ALONE, own: Collection[str] = ()) -> Mapping[str, Tensor]:
    """Return the entries that the output depends on, bool ``(n,)``, by the name of the value; only for values that
    also have other entries.

    All ranks of a divided graph call it; ``own`` names the values that are divided over them.
    """
    like, draws = _like(graph), _Draws(tp_group, frozenset(own))
    masks = {graph.output.name: torch.ones(graph.output.shape, dtype=torch.bool, device=like.device)}
    for node in reversed(graph.nodes[1:]):
        for name, reached in zip(node.inputs, _before(node, masks[node.name], like, draws), strict=True):
            masks[name] = masks[name] | reached if name in masks else reached
    if tp_group.axis.size > 1:
        _agree({name: mask for name, mask in masks.items() if name not in draws.own}, tp_group)
    return {name: mask.flatten() for name, mask in masks.items() if not bool(mask.all())}


def _agree(masks: Mapping[str, Tensor], tp_group: RankGroup) -> None:
    """Add other ranks' entries of replicated values, so that all have equally many rows."""
    everywhere = tp_group.sum(torch.cat([mask.flatten() for mask in masks.values()]).float()) > 0
    parts = torch.split(everywhere, [mask.numel() for mask in masks.values()])
    for mask, part in zip(masks.values(), parts, strict=True):
        mask.copy_(part.reshape(mask.shape))


class _Draws:
    """Random numbers above 0: the same on all ranks for replicated values, different on each for its own."""

    def __init__(self, tp_group: RankGroup, own: frozenset[str]) -> None:
        self.tp_group, self.own = tp_group, own
        self._common = torch.Generator().manual_seed(0)
        self._of_rank = torch.Generator().manual_seed(1 + tp_group.axis.rank)

    def of(self, node: Node, like: Tensor) -> Tensor:
        """Return random coefficients of a node's value, ``(1, DRAWS, *shape)``."""
        generator = self._of_rank if node.name in self.own else self._common
        drawn = 0.5 + torch.rand(1, DRAWS, *node.shape, generator=generator, dtype=like.dtype)
        return drawn.to(like.device)


def _before(node: Node, mask: Tensor, like: Tensor, draws: _Draws) -> Iterator[Tensor]:
    """Yield the entries of each input on which these entries ``(*shape)`` depend."""
    if node.operator in NONLINEAR:
        yield from NONLINEAR[node.operator].needed_of(node, mask)
        return
    step = LINEAR[node.operator].backward(node, draws.of(node, like) * mask, draws.tp_group)
    for coefficients in step.coefficients:
        assert isinstance(coefficients, Tensor)
        yield (coefficients != 0).flatten(0, 1).any(dim=0)


def _like(graph: Graph) -> Tensor:
    """Return a constant of the graph, which has its type and its device."""
    for node in graph.nodes:
        for value in node.arguments.values():
            held = value.value if isinstance(value, Repeated) else value
            if isinstance(held, Tensor) and held.is_floating_point():
                return held
    return torch.empty(0)


class Before(Protocol):
    """The pipeline stages before a network, whose input is their output.

    ``entries`` is the largest size of a row in them, over all tensor-parallel ranks; ``features`` counts the model's
    inputs.
    """

    @property
    def entries(self) -> int:
        """Return how large a row gets, on all tensor-parallel ranks together."""

    @property
    def features(self) -> int:
        """Return the number of the model's inputs."""

    def lower_bounds(self, rows: Tensor, own: bool) -> Tensor:
        """Return lower bounds ``(batch, rows)`` of rows times the input; ``own`` as for ``Pass.lower_bounds``."""

    def optimised(self, anchor: Tensor) -> OptimisedBefore:
        """Begin to optimise the stages' relaxations from their start; ``anchor`` is a number with a gradient."""

    def chosen(self, rows: Tensor, own: bool) -> Tensor:
        """Return rigorous lower bounds through the relaxations of the last ascent."""

    def planes(self, rows: Tensor, own: bool) -> tuple[Tensor, Tensor]:
        """Return rigorous affine functions of the model's input below the rows: coefficients ``(batch, rows,
        features)`` and constants ``(batch, rows)``.
        """


class OptimisedBefore(Protocol):
    """Stages before a network whose relaxations are being optimised: bounds are differentiable in the rows, and each
    gradient is a step of the stages' parameters.
    """

    def lower_bounds(self, rows: Tensor, own: bool) -> Tensor:
        """Return lower bounds ``(batch, rows)``, as those of :class:`Before`."""

    def restart(self) -> None:
        """Reset the parameters to their start."""


@dataclass(frozen=True, eq=False)
class Network:
    """A checked graph with the placement of its values and the ranks that share it.

    ``before`` bounds the input where it is not the model's.
    """

    graph: Graph
    placements: Mapping[str, Placement]
    tp_group: RankGroup
    nodes: Mapping[str, Node] = field(repr=False)
    before: Before | None = None

    @cached_property
    def _planned(self) -> dict[tuple[Any, ...], Any]:
        return {}

    def planned(self, plan: Callable[Concatenate[Network, P], T], *given: P.args, **named: P.kwargs) -> T:
        """Return what ``plan`` says about this network, whatever the boxes are: it is computed once."""
        key = (plan, given, *named.items())
        if key not in self._planned:
            self._planned[key] = plan(self, *given, **named)
        found: T = self._planned[key]
        return found

    @property
    def is_alone(self) -> bool:
        """Return whether bounding it asks no other process."""
        return self.tp_group.axis.size == 1 and self.before is None

    def is_own(self, name: str) -> bool:
        return self.placements[name] is Placement.OWN

    def shares(self, name: str) -> int:
        """Return the number of ranks over which a value is divided."""
        return self.tp_group.axis.size if self.is_own(name) else 1

    @cached_property
    def nonlinear(self) -> tuple[Node, ...]:
        """Return the nodes that are relaxed, in execution order."""
        return tuple(node for node in self.graph.nodes[1:] if node.operator in NONLINEAR)

    @cached_property
    def relaxed(self) -> frozenset[str]:
        """Return the names of the non-linear nodes."""
        return frozenset(node.name for node in self.nonlinear)

    @cached_property
    def preactivations(self) -> frozenset[str]:
        """Return the names of the values that non-linear nodes read."""
        return frozenset(name for node in self.nonlinear for name in node.inputs)

    @cached_property
    def entrance(self) -> str | None:
        """Return the node that only reshapes the input, if nothing else uses the input."""
        name = self.graph.input.name
        users = [node for node in self.graph.nodes[1:] if name in node.inputs]
        return users[0].name if len(users) == 1 and OPERATORS[users[0].operator].keeps_order else None

    @cached_property
    def stretches(self) -> Mapping[str, float]:
        """Return the stretch of each node before the last non-linear one, by name: a Lipschitz constant."""
        last = self.position[self.nonlinear[-1].name] if self.nonlinear else 0
        return {node.name: OPERATORS[node.operator].stretch(node) for node in self.graph.nodes[1:last]}

    @cached_property
    def widest(self) -> int:
        """Return the number of entries of the largest value."""
        return max(node.size for node in self.graph.nodes)

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Return the position of each node in execution order."""
        return {node.name: index for index, node in enumerate(self.graph.nodes)}

    @cached_property
    def needed(self) -> Mapping[str, Tensor]:
        """Return the entries, bool ``(n,)``, on which the output depends, by name, for values where it does not
        depend on all.

        Nothing is known of a network behind pipeline stages. Every tensor-parallel rank asks at the same time.
        """
        if self.before is not None:
            return {}
        return _needed_entries(self.graph, self.tp_group, [name for name in self.placements if self.is_own(name)])

    def interval(self, node: Node, known: Mapping[str, Interval]) -> Interval:
        """Propagate intervals through one node; a meaningless end after an overflow becomes infinite."""
        operator = OPERATORS[node.operator]
        found = operator.interval(node, [known[name] for name in node.inputs], self.tp_group)
        found = found.without_nan() if operator.makes_nan else found
        return found if found.lower.requires_grad else self.narrowed(node, found, known)

    def narrowed(self, node: Node, found: Interval, known: Mapping[str, Interval]) -> Interval:
        """Return the ``found`` interval of a node, cut to the natural range of its value."""
        return self.ranges[node.name].narrowed(found, known) if node.name in self.ranges else found

    @cached_property
    def ranges(self) -> Mapping[str, Range]:
        """Return the natural ranges of values.

        A sum over entries of other ranks is followed by its collective, and has no range. Nor has a test whether a
        value is a number if other ranks have a part of the model.
        """
        found = ranges_of(self.graph) | expectations_of(self.graph)
        return found | (tests_of(self.graph) if self.is_alone else {})

    def operator_of(self, node: Node) -> NonlinearOperator:
        """Return the operator of one of ``nonlinear``."""
        return NONLINEAR[node.operator]

    def any_operator_of(self, node: Node) -> Operator:
        """Return the operator of a node, linear or not."""
        return OPERATORS[node.operator]

    def linear_operator_of(self, node: Node) -> LinearOperator | None:
        """Return the operator of a node that is not relaxed."""
        return LINEAR.get(node.operator)

    def accumulating_operator_of(self, node: Node) -> AccumulatingOperator | None:
        """Return the operator of a node whose step may be added in place."""
        return ACCUMULATING.get(node.operator)

    def collective_of(self, node: Node) -> Collective | None:
        """Return the operator of a node at which ranks communicate."""
        return COLLECTIVES.get(node.operator)

    def gathers_parts(self, node: Node) -> bool:
        """Return whether every rank has its own part before a node, and all have the same value after it."""
        return not self.is_own(node.name) and any(self.is_own(name) for name in node.inputs)

    def agreed(self, name: str, bounds: Interval) -> Interval:
        """Return bounds of a replicated value, equal to the last bit on all ranks: since comparisons of them
        choose relaxations.
        """
        if self.is_own(name) or self.tp_group.axis.size == 1:
            return bounds
        lower, upper = self.tp_group.agree(torch.stack([bounds.lower, bounds.upper])).unbind()
        return Interval(lower, upper)


def prepare(module: nn.Module, input_shape: Sequence[int], axis: Axis = SINGLE) -> Network:
    """Trace ``module`` and check that it can be bounded; every rank of ``axis`` calls it with its part of the model.

    ``input_shape`` is that of one instance. Raises :class:`~service.bounds.graph.UnsupportedModelError` with
    the obstacle.
    """
    return from_graph(capture(module, input_shape), axis)


def from_graph(graph: Graph, axis: Axis = SINGLE) -> Network:
    """Check an existing graph like :func:`prepare`."""
    check(graph)
    tp_group = RankGroup(axis)
    graph = entered(graph, tp_group)
    return Network(graph, place(graph), tp_group, graph.by_name)


@dataclass(frozen=True, eq=False)
class Stage:
    """A traced module, or one of its pipeline stages, that is bounded repeatedly while its parameters change."""

    trace: Trace
    placements: Mapping[str, Placement]
    tp_group: RankGroup

    def network(self, state: Mapping[str, Tensor]) -> Network:
        """Return the network over the present parameters; its bounds are differentiable in them."""
        graph = self.trace.graph(state)
        return Network(graph, self.placements, self.tp_group, graph.by_name)


def prepare_stage(module: nn.Module, input_shape: Sequence[int], axis: Axis = SINGLE) -> Stage:
    """Check a module in training like :func:`prepare`; its input and output may be divided over the ranks."""
    traced = trace(module, input_shape)
    graph = traced.graph({name: tensor.detach() for name, tensor in local_state(module).items()})
    check(graph)
    placements, tp_group = place_part(graph, entering(graph)), RankGroup(axis)
    check_constants(graph, placements, tp_group)
    return Stage(traced, placements, tp_group)
