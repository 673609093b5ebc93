"""Certifies that values are numbers in a file's own arithmetic: neither NaN nor infinite, for every input of a box.

Bounds hold for real numbers, and do not tell where a file divides by 0 or overflows: what reads an infinite value may
be finite again. So intervals go forward once more through everything that a value is computed from, as the file
computes it: each end is moved outwards by the rounding of float32, partial sums and squares must not overflow, and
every function must be defined on the whole interval. By induction over the nodes, the first value that is not a number
would come from numbers within their intervals, on which its operator gives a number. Nothing is concluded from the name
of an operator: one that :func:`_propagated` does not know leaves everything after it uncertain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log, prod
from typing import Any

import torch
from torch import Tensor

from service.bounds.graph import CHOICE, TESTS, Graph, Node, Ref, Repeated
from service.bounds.interval import Interval
from service.bounds.operators import NONLINEAR, OPERATORS
from service.bounds.operators.add import Addition
from service.bounds.operators.base import Collective, ExactOperator, LinearOperator, Operator
from service.bounds.operators.choice import OPERANDS, UndecidedWhere, Where
from service.bounds.operators.elementary import Exponential, Logarithm
from service.bounds.operators.matmul import MatrixOfTwo
from service.bounds.operators.maximum import Maximum
from service.bounds.operators.moves import Concatenate, Expand, Pad, Select, Slice
from service.bounds.operators.mul import Multiple, Product, Quotient
from service.bounds.operators.power import Power
from service.bounds.operators.relu import PiecewiseActivation
from service.bounds.operators.sin import Periodic
from service.bounds.operators.smooth import SmoothActivation, SmoothFunction
from service.bounds.operators.stepped import Floor, NumberTest
from service.bounds.operators.sum import Sum
from service.bounds.ranges import LogSumExp, Range, Softmax, ranges_of
from service.bounds.rank_group import RankGroup
from service.bounds.rounding import magnitude

FLOAT32 = torch.finfo(torch.float32)
WITHIN, CALM = FLOAT32.max / 2**8, 2.0**60
"""Sizes of values that are far from an overflow, and of those whose squares are: an operator of a file that several
nodes stand for may compute in another way, and is certain only for the latter.
"""
SCALE = 2.0**30
"""The error of a function in float32, here and in the file, over that in float64."""
BEYOND, LEAST_SHARE = 2.0**-20, 2.0**-100
"""A share of its limit by which a function computed in float32 may exceed it; shares of a softmax below the other
number may be 0.
"""
_MOVING = (ExactOperator, Concatenate, Expand, Pad, Select, Slice, Where)
_ROUNDED_ONCE = (Addition, Multiple, Product, PiecewiseActivation)
_BY_STEPS = (Floor, Maximum, UndecidedWhere)


@dataclass(frozen=True, eq=False)
class OwnInterval:
    """An interval of a value as the file computes it, which ``holds``, bool ``(batch,)``, or else nothing is known.

    An entry whose ends are the same infinity is that: a mask has it.
    """

    interval: Interval
    holds: Tensor


@dataclass(frozen=True, eq=False)
class NumberRange(Range):
    """The range of a test whether a value is a number: its answer is no where that is certain."""

    own: OwnArithmetic
    test: str

    def narrowed(self, found: Interval, known: Mapping[str, Interval]) -> Interval:
        box = known.get(self.own.graph.input.name)
        return found if box is None else found.meet(self.own.certified(box, self.test).interval)


def tests_of(graph: Graph) -> dict[str, Range]:
    """Return the ranges of all tests whether a value is a number, by name."""
    own = OwnArithmetic(graph)
    return {node.name: NumberRange(own, node.name) for node in graph.nodes[1:] if node.operator in TESTS}


@dataclass(frozen=True, eq=False)
class OwnArithmetic:
    """A graph, of which this rank has all, as the file computes it."""

    graph: Graph

    def certified(self, box: Interval, name: str) -> OwnInterval:
        """Return a value's interval in boxes ``(batch, *shape)`` of the input."""
        return self.all_certified(box, [name])[name]

    @torch.no_grad()
    def all_certified(self, box: Interval, names: Collection[str]) -> Mapping[str, OwnInterval]:
        """Return the intervals of several values, and of what they are computed from."""
        first = self.graph.input.name
        found = {first: OwnInterval(box, _each(box.lower.isfinite() & box.upper.isfinite()))}
        for node in self._before(names):
            if node.name in self._of_scores:
                found[node.name] = _of_scores(self._of_scores[node.name], found, node)
            else:
                found[node.name] = self._step(node, [found[each] for each in node.inputs])
        return found

    def _before(self, names: Collection[str]) -> list[Node]:
        """Return the nodes that values are computed from, in execution order, and their own."""
        needed = set(names)
        for node in reversed(self.graph.nodes[1:]):
            if node.name in needed:
                needed.update(self._read_by(node))
        return [node for node in self.graph.nodes[1:] if node.name in needed]

    def _read_by(self, node: Node) -> tuple[str, ...]:
        return (self._of_scores[node.name].scores,) if node.name in self._of_scores else node.inputs

    @cached_property
    def _of_scores(self) -> Mapping[str, Softmax | LogSumExp]:
        """Return the softmaxes and sums of powers that are one operator of the file, which subtracts the largest score
        from all: no power overflows, and their sum is at least 1.
        """
        return fused_powers(self.graph)

    @cached_property
    def _is_one_of_several(self) -> frozenset[str]:
        """Return the nodes that stand with others for one operator of the file, or may do so."""
        counts = Counter(node.source for node in self.graph.nodes)
        return frozenset(node.name for node in self.graph.nodes if not node.source or counts[node.source] > 1)

    def _step(self, node: Node, inputs: Sequence[OwnInterval]) -> OwnInterval:
        operator, ends = OPERATORS[node.operator], [each.interval for each in inputs]
        holds = torch.stack([each.holds for each in inputs]).all(dim=0)
        if isinstance(operator, NumberTest):
            is_certain = holds & _each(operator.is_surely_not(node, ends[0]))
            no = torch.full_like(ends[0].lower, -NumberTest.YES)
            yes = torch.where(_over(is_certain, no), no, -no)
            return OwnInterval(Interval(no, yes), torch.ones_like(holds))
        if _is_composed(operator) or (node.name in self._is_one_of_several and not isinstance(operator, _MOVING)):
            for each in ends:
                holds = holds & _each(magnitude(each) <= CALM)
        found, is_usable = _propagated(operator, node, ends)
        is_number = (found.lower >= -FLOAT32.max) & (found.upper <= FLOAT32.max) & (found.lower <= found.upper)
        return OwnInterval(found, holds & is_usable & _each(is_number | _is_infinity(found)))


def fused_powers(graph: Graph) -> Mapping[str, Softmax | LogSumExp]:
    """Return the ranges of the softmaxes and of the logarithms of sums of powers that one operator of the file is."""
    nodes, found = graph.by_name, dict[str, Softmax | LogSumExp]()
    for name, each in ranges_of(graph).items():
        if isinstance(each, Softmax | LogSumExp):
            within = _between(nodes, each.scores, name)
            if all(node.source == nodes[name].source for node in within):
                found[name] = each
    return found


def _between(nodes: Mapping[str, Node], first: str, last: str) -> Iterator[Node]:
    """Yield the nodes from ``last`` back to those that read ``first``."""
    left, seen = [last], set[str]()
    while left:
        name = left.pop()
        if name not in seen and name != first:
            seen.add(name)
            yield nodes[name]
            left += nodes[name].inputs


def _of_scores(known: Softmax | LogSumExp, found: Mapping[str, OwnInterval], node: Node) -> OwnInterval:
    scores = found[known.scores]
    axes, keepdim = [axis + 1 for axis in known.axes], isinstance(known, Softmax) or known.keepdim
    lower, upper = scores.interval.lower, scores.interval.upper
    counted = lower.isfinite()
    if isinstance(known, Softmax) and known.weights is not None:
        counted = counted & (known.weights.to(lower) > 0)
    holds = scores.holds & _each(counted.any(dim=axes, keepdim=True) & (upper < torch.inf))
    if isinstance(known, Softmax):
        none = lower.new_zeros(len(lower), *node.shape)
        shares = known.narrowed(Interval(none, torch.ones_like(none)), {known.scores: scores.interval})
        least = torch.where(shares.lower > LEAST_SHARE, shares.lower * (1 - 16 * BEYOND), none)
        return OwnInterval(Interval(least, shares.upper * (1 + 16 * BEYOND)), holds)
    least, most = lower.amax(dim=axes, keepdim=keepdim), upper.amax(dim=axes, keepdim=keepdim)
    count = prod(lower.shape[axis] for axis in axes)
    slack = FLOAT32.eps * (24 + count) * (1 + torch.maximum(least.abs(), most.abs()))
    return OwnInterval(Interval(least - slack, most + log(count) + slack), holds)


def _is_composed(operator: Operator) -> bool:
    """Return whether a file may spell a function out, as it does a GELU: its parts may overflow where it does not."""
    is_elementary = isinstance(operator, Exponential | Logarithm | Power)
    return isinstance(operator, SmoothActivation) and not is_elementary


def _propagated(operator: Operator, node: Node, ends: Sequence[Interval]) -> tuple[Interval, Tensor]:
    """Return the interval of an operator's result, and in which boxes that may be used, bool ``(batch,)``."""
    everywhere = torch.ones(len(ends[0].lower), dtype=torch.bool, device=ends[0].lower.device)
    if isinstance(operator, Collective) or not isinstance(operator, _KNOWN):
        whole = torch.full((len(everywhere), *node.shape), torch.inf).to(ends[0].lower)
        return Interval(-whole, whole), ~everywhere
    found = operator.interval(node, ends, RankGroup())
    if isinstance(operator, SmoothActivation):
        return _of_function(operator.smooth(node), ends[0], found)
    if isinstance(operator, Periodic):
        size = torch.full_like(found.lower, 1 + 2.0**-18)
        found = Interval(-size, size)
    elif isinstance(operator, Quotient):  # rounded twice, as the product with a reciprocal
        slack = 4 * FLOAT32.eps * torch.stack([found.lower.abs(), found.upper.abs()])
        found = _rounded(Interval(found.lower - slack[0], found.upper + slack[1]))
    elif isinstance(operator, (*_ROUNDED_ONCE, Pad)) and node.arguments.get("alpha", 1) == 1:
        with_rounded = operator.interval(_with_rounded_numbers(node), ends, RankGroup())
        lower, upper = torch.minimum(found.lower, with_rounded.lower), torch.maximum(found.upper, with_rounded.upper)
        found = _rounded(Interval(lower, upper))
    elif not isinstance(operator, (*_MOVING, *_BY_STEPS)):
        return _accumulated(operator, node, ends, found)
    return found, everywhere


def _of_function(smooth: SmoothFunction, bounds: Interval, found: Interval) -> tuple[Interval, Tensor]:
    """Return the interval of a function with the errors of its values, and where it is defined."""
    usable = _each(bounds.lower <= bounds.upper if smooth.defined is None else smooth.defined(bounds))
    below, above = (
        SCALE * torch.maximum(*(smooth.value_error(point, end) for point in (bounds.lower, bounds.upper)))
        + FLOAT32.tiny
        for end in (found.lower, found.upper)
    )
    lower, upper = (found.lower - below).clamp(min=smooth.least), (found.upper + above).clamp(max=smooth.greatest)
    # onnxruntime's sigmoid reaches 1.0000001: only 0 is a limit that rounding keeps.
    return Interval(lower - BEYOND * lower.abs(), upper + BEYOND * upper.abs()), usable


_KNOWN = (LinearOperator, SmoothActivation, Periodic, MatrixOfTwo, *_ROUNDED_ONCE, *_BY_STEPS)


_WHOLE = 2**24
"""Up to this, whole numbers are numbers of float32."""


def _with_rounded_numbers(node: Node) -> Node:
    """Return the node with its numbers as torch takes them beside a tensor of float32."""

    def rounded(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype != torch.bool and not value.is_complex():
            return value.float().to(value.dtype)
        if isinstance(value, float) or (type(value) is int and abs(value) > _WHOLE):
            return torch.tensor(value, dtype=torch.float64).float().item()
        return value

    return replace(node, arguments={name: rounded(value) for name, value in node.arguments.items()})


def _rounded(found: Interval) -> Interval:
    """Return ends that hold whether the result is rounded to float32 once or not at all: rounding is monotone."""
    low, high = (end.float().to(end.dtype) for end in (found.lower, found.upper))
    return Interval(torch.minimum(found.lower, low), torch.maximum(found.upper, high))


def _accumulated(operator: Operator, node: Node, ends: Sequence[Interval], found: Interval) -> tuple[Interval, Tensor]:
    """Return the interval of a result that is a sum, in any order; no partial sum may overflow.

    Its terms are at most as large as those for inputs of the same sizes with any signs.
    """
    sizes = [Interval(-magnitude(each), magnitude(each)) for each in ends]
    most = magnitude(operator.interval(node, sizes, RankGroup()))
    terms = max(prod(shape) for shape in node.input_shapes) + 4
    slack = 2 * terms * (FLOAT32.eps * most + FLOAT32.tiny)
    lower, upper = found.lower - slack, found.upper + slack
    if isinstance(operator, Sum):  # a sum of numbers that are not negative is none, however it is rounded
        least = torch.stack([_each(each.lower >= 0) for each in ends]).all(dim=0)
        lower = torch.where(_over(least, lower), lower.clamp(min=0), lower)
    return Interval(lower, upper), _each(most <= WITHIN)


def _each(entries: Tensor) -> Tensor:
    """Return for each box whether all of its entries are true."""
    return entries.reshape(len(entries), -1).all(dim=1)


def _over(flags: Tensor, like: Tensor) -> Tensor:
    return flags.reshape(-1, *[1] * (like.dim() - 1))


def undefined_nodes(
    graph: Graph, box: Interval, inputs: Mapping[str, Sequence[Interval]], most: float = FLOAT32.max
) -> dict[str, Tensor]:
    """Return, by name, the nodes on which the output depends and whose inputs may be infinite, or outside of what the
    node is defined for, with the instances, bool ``(batch,)``; what is larger than ``most`` overflows.

    What only a test whether it is a number reads, or a choice takes only where it is one, may be none: a test has an
    answer for everything. An input is within a domain if it is in the file's own arithmetic, or by bounds with room for
    rounding; bounds alone count where nothing is certain of that arithmetic.
    """
    found, inside = dict[str, Tensor](), _within_fused(graph)
    asked = [node.inputs[0] for node in _reaching_as_number(graph) if node.inputs and _domain(node) is not None]
    own = OwnArithmetic(graph).all_certified(box, asked)
    for node in _reaching_as_number(graph):
        if node.operator not in NONLINEAR or node.operator in TESTS or (node.name in inside and node.operator != EXP):
            continue
        holds = torch.stack([_each(_is_infinity(each) | (magnitude(each) <= most)) for each in inputs[node.name]])
        if node.name not in inside and (defined := _domain(node)) is not None:
            bounds, certified = inputs[node.name][0], own[node.inputs[0]]
            room = 16 * BEYOND * magnitude(bounds) + 4 / most  # the smallest normal number, below which all may be 0
            room = room + _lost_in_sum(graph.by_name[node.inputs[0]], own, bounds)
            is_defined = _each(defined(certified.interval)) & certified.holds
            is_defined |= _each(defined(Interval(bounds.lower - room, bounds.upper + room)))
            is_defined |= _each(defined(bounds)) & ~certified.holds
            holds = torch.cat([holds, is_defined[None]])
        found[node.name] = ~holds.all(dim=0)
    return {name: flags for name, flags in found.items() if bool(flags.any())}


def _lost_in_sum(node: Node, own: Mapping[str, OwnInterval], like: Interval) -> Tensor:
    """Return the rounding of a sum and of its number: a share of its terms, which may be larger than what is left."""
    lost = torch.zeros_like(like.lower)
    if isinstance(OPERATORS.get(node.operator), Addition):
        for name in node.inputs:
            size = magnitude(own[name].interval)
            lost = lost + 4 * FLOAT32.eps * (size if size.shape == lost.shape else _over(size.flatten(1).amax(1), lost))
    return lost


def may_be_undefined(graph: Graph) -> bool:
    """Return whether some node on which the output depends is not defined for all finite numbers."""
    inside = _within_fused(graph)
    return any(node.name not in inside and _domain(node) is not None for node in _reaching_as_number(graph))


EXP, LARGEST_POWER = "aten.exp.default", 88.0
"""Where float32 overflows."""


def _domain(node: Node) -> Callable[[Interval], Tensor] | None:
    """Return which intervals are in a function's domain; ``None`` if all are."""
    operator = OPERATORS[node.operator]
    if node.operator == EXP:
        return lambda bounds: bounds.upper < LARGEST_POWER
    return operator.smooth(node).defined if isinstance(operator, SmoothActivation) else None


def _is_infinity(bounds: Interval) -> Tensor:
    """Return the entries, bool, that are certainly infinite, such as those of a mask. Intervals keep the largest
    number for the end of an infinity that is nearer to 0.
    """
    largest = torch.finfo(bounds.lower.dtype).max
    return (bounds.lower >= largest) | (bounds.upper <= -largest)


def _within_fused(graph: Graph) -> set[str]:
    nodes = graph.by_name
    return {node.name for name, each in fused_powers(graph).items() for node in _between(nodes, each.scores, name)}


def _reaching_as_number(graph: Graph) -> list[Node]:
    """Return the nodes whose result reaches the output otherwise than by a test."""
    nodes, needed = graph.by_name, {graph.output.name}
    for node in reversed(graph.nodes[1:]):
        if node.name in needed and node.operator not in TESTS:
            needed.update(name for name in node.inputs if name != _replaced(nodes, node))
    return [node for node in graph.nodes[1:] if node.name in needed]


def _replaced(nodes: Mapping[str, Node], node: Node) -> str | None:
    """Return the value that a choice takes only where a test has found that it is a number."""
    condition, other = node.arguments.get("condition"), node.arguments.get("other")
    if node.operator != CHOICE or not isinstance(condition, Ref) or not isinstance(other, Ref):
        return None
    test = _find_test(nodes, nodes[condition.name])
    asks = test is not None and NumberTest.asks_for_nan(test) and test.arguments["self"] == other
    return other.name if asks and other.name not in node.inputs[1:-1] else None


def _find_test(nodes: Mapping[str, Node], condition: Node) -> Node | None:
    """Return the test whose answer alone is a condition: itself, or half of 1 less than a choice of 1 for yes and 0
    for no.
    """
    if condition.operator in TESTS:
        return condition
    node = condition
    while len(node.inputs) == 1 and (_is_less_half(node) or isinstance(OPERATORS.get(node.operator), _MOVING)):
        node = nodes[node.inputs[0]]
    is_asked = node.operator == CHOICE and nodes[node.inputs[0]].operator in TESTS and len(node.inputs) == 1
    return nodes[node.inputs[0]] if is_asked and [_number(node, name) for name in OPERANDS] == [1.0, 0.0] else None


def _number(node: Node, argument: str) -> float | None:
    """Return the one number that a constant is."""
    value = node.arguments[argument]
    held = value.value if isinstance(value, Repeated) else value
    return float(held) if not isinstance(held, Tensor) or held.numel() == 1 else None


def _is_less_half(node: Node) -> bool:
    less, factor = node.arguments.get("other"), node.arguments.get("alpha", 1)
    return node.operator == "aten.sub.Tensor" and isinstance(less, float) and less * factor == NumberTest.YES
