"""Ranges that hold for composed functions whatever their input: softmax, log-sum-exp, normalisations, and gated means.

Interval propagation through their parts forgets that the same values are in numerator and denominator. The range of
``log Σ exp`` and of a softmax over a box is exact (each is monotone in each score). The largest score is subtracted
from all, so that no exponential overflows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from service.bounds.graph import PRODUCT, Graph, Node
from service.bounds.interval import Interval

EXP, LOG, RECIPROCAL, RSQRT = "aten.exp.default", "aten.log.default", "aten.reciprocal.default", "aten.rsqrt.default"
SUM, MEAN, POWER = "aten.sum.dim_IntList", "aten.mean.dim", "aten.pow.Tensor_Scalar"
SIGMOID = "aten.sigmoid.default"
ADD, SUB, MUL = "aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor"


CLOSE, NEAR = {torch.float32: 5.0, torch.float64: 13.0}, 64.0
"""The spread of scores, and their distance from 0, up to which sums of their powers lose less than the margins allow.
"""


class Range(ABC):
    """The range of one node."""

    @abstractmethod
    def narrowed(self, found: Interval, known: Mapping[str, Interval]) -> Interval:
        """Return the bounds ``found`` by propagation, tightened by the range."""


@dataclass(frozen=True)
class _WithinLimit(Range):
    """``|value| ≤ limit``, give or take rounding, where there is a value: everywhere if it ``exists``, and else where
    the bounds found by propagation are finite, since they are infinite where an operator may be undefined.
    """

    limit: float
    exists: bool

    def narrowed(self, found: Interval, known: Mapping[str, Interval]) -> Interval:
        most = self.limit * (1 + 16 * torch.finfo(found.lower.dtype).eps)
        within = found.map(lambda end: end.clamp(-most, most))
        if self.exists:
            return within
        is_known = found.lower.isfinite() & found.upper.isfinite()
        return Interval(
            torch.where(is_known, within.lower, found.lower), torch.where(is_known, within.upper, found.upper)
        )


@dataclass(frozen=True, eq=False)
class _Between(Range):
    """``a + s (b − a)`` with s from 0 to 1, a weighted mean: between the least and the largest of both, give or take
    rounding. So are the hidden values of a GRU, step by step.
    """

    value: str
    other: str | Tensor

    def narrowed(self, found: Interval, known: Mapping[str, Interval]) -> Interval:
        own = known.get(self.value)
        other = known.get(self.other) if isinstance(self.other, str) else Interval.point(self.other.to(found.lower))
        if own is None or other is None:
            return found
        lower, upper = torch.minimum(own.lower, other.lower), torch.maximum(own.upper, other.upper)
        slack = 8 * torch.finfo(lower.dtype).eps * torch.maximum(lower.abs(), upper.abs())
        within = Interval(lower - slack, upper + slack)
        return Interval(
            torch.where(within.lower > found.lower, within.lower, found.lower),
            torch.where(within.upper < found.upper, within.upper, found.upper),
        )


@dataclass(frozen=True)
class _OfScores(Range):
    """A function of ``scores`` along ``axes`` of an instance.

    The bounds found by propagation count too if they may be tighter: if no power is so much smaller than another that
    rounding decides about it.
    """

    scores: str
    axes: tuple[int, ...]

    def _ends(self, known: Mapping[str, Interval]) -> tuple[Interval, list[int]] | None:
        scores = known.get(self.scores)
        return None if scores is None else (scores, [axis + 1 for axis in self.axes])

    @staticmethod
    def _unless_undefined(lower: Tensor, upper: Tensor, found: Interval) -> Interval:
        """Return these ends, or those ``found`` if infinite scores leave none, without asking the host."""
        return Interval(torch.where(lower.isnan(), found.lower, lower), torch.where(upper.isnan(), found.upper, upper))

    @staticmethod
    def _met(own: Interval, found: Interval, scores: Interval, axes: list[int], keepdim: bool) -> Interval:
        """Return the range's ``own`` bounds, with those ``found`` if scores are close to each other."""
        lower, upper = (each.detach() for each in (scores.lower, scores.upper))
        least, most = lower.amin(axes, keepdim=keepdim), upper.amax(axes, keepdim=keepdim)
        are_close = (most - least <= CLOSE[lower.dtype]) & (torch.maximum(-least, most) <= NEAR)
        both = own.meet(found)
        return Interval(torch.where(are_close, both.lower, own.lower), torch.where(are_close, both.upper, own.upper))


@dataclass(frozen=True)
class LogSumExp(_OfScores):
    """``log Σ exp``, which rises with every score."""

    keepdim: bool

    def narrowed(self, found: Interval, known: Mapping[str, Interval]) -> Interval:
        if (ends := self._ends(known)) is None:
            return found
        scores, axes = ends
        count = torch.Size(scores.lower.shape[axis] for axis in axes).numel()
        exact = scores.map(lambda end: torch.logsumexp(end, axes, keepdim=self.keepdim))
        # Of an exponential for each score, their sum, its logarithm and the score that was subtracted.
        slack = torch.finfo(exact.lower.dtype).eps * (24 + count)
        lower, upper = exact.lower - slack * (1 + exact.lower.abs()), exact.upper + slack * (1 + exact.upper.abs())
        own = self._unless_undefined(lower, upper, found)
        return self._met(own, found, scores, axes, self.keepdim)


@dataclass(frozen=True, eq=False)
class Softmax(_OfScores):
    """``a_i exp(x_i) / Σ a_j exp(x_j)``, which rises with its own score and falls with the others; ``weights``
    are constants of at least 0, such as those of a mask.
    """

    weights: Tensor | None

    def narrowed(self, found: Interval, known: Mapping[str, Interval]) -> Interval:
        if (ends := self._ends(known)) is None:
            return found
        scores, axes = ends
        weighted = self.weighted(scores)
        lower, _ = self._shares(weighted.lower, weighted.upper, axes)
        _, upper = self._shares(weighted.upper, weighted.lower, axes)
        own = self._unless_undefined(lower, upper, found)
        return self._met(own, found, scores, axes, keepdim=True)

    def weighted(self, scores: Interval) -> Interval:
        """Return bounds of the scores whose powers have the weights as factors; weights of 1 and of 0 lose nothing."""
        if self.weights is None:
            return scores
        weights = self.weights.to(scores.lower)
        logarithms, eps = weights.log(), torch.finfo(weights.dtype).eps
        size = torch.maximum(scores.lower.abs(), scores.upper.abs()) + logarithms.abs()
        slack = torch.where((weights == 0) | (weights == 1), 0.0, 16 * eps * size)
        return Interval(scores.lower + logarithms - slack, scores.upper + logarithms + slack)

    @staticmethod
    def _shares(own: Tensor, others: Tensor, axes: list[int]) -> tuple[Tensor, Tensor]:
        """Return bounds from below and above of ``exp(own_i) / (exp(own_i) + Σ exp(others_j))``, j not i."""
        limits = torch.finfo(own.dtype)
        most = others.amax(axes, keepdim=True)
        powers = (others - most).exp()
        total = powers.sum(axes, keepdim=True)
        count = torch.Size(own.shape[axis] for axis in axes).numel()
        lost, beyond = 4 * (count + 8) * limits.eps * total, most - own
        relative = limits.eps * (16 + 4 * beyond.abs().clamp(max=1e4))
        rest = total - powers
        below = 1 / (1 + (rest + lost) * beyond.exp()) * (1 - relative)
        above = 1 / (1 + (rest - lost).clamp(min=0) * beyond.exp()) * (1 + relative) + 2 * limits.tiny
        # Nothing times an infinite power is no share of it.
        above = torch.where((rest - lost) <= 0, torch.ones_like(above), above)
        return below.clamp(0, 1), above.clamp(0, 1)


def ranges_of(graph: Graph) -> dict[str, Range]:
    """Return the ranges of those of a graph's nodes that have one, by name."""
    nodes = graph.by_name
    found = {node.name: _range(nodes, node) for node in graph.nodes[1:] if node.operator in {PRODUCT, LOG, ADD}}
    return {name: each for name, each in found.items() if each is not None}


def _range(nodes: Mapping[str, Node], node: Node) -> Range | None:
    if node.operator == LOG:
        return _log_sum(nodes, node)
    if node.operator == ADD:
        return _mean_of_two(nodes, node)
    for whole, inverse in (node.inputs, node.inputs[::-1]):
        found = _softmax(nodes, node, whole, inverse) or _normalised(nodes, node, whole, inverse)
        if found is not None:
            return found
    return None


def _mean_of_two(nodes: Mapping[str, Node], node: Node) -> Range | None:
    """Return the range of ``a + s (b − a)``, or of ``s b + (1 − s) a``, with a sigmoid s."""
    if len(node.inputs) != 2 or node.arguments.get("alpha", 1) != 1:
        return None
    own, product = node.inputs
    if nodes[product].operator != PRODUCT or len(nodes[product].inputs) != 2:
        return None
    first, second = (_halves(nodes, each, node.shape) for each in node.inputs)
    for (share, value), (rest, other) in ((one, two) for one in first for two in second):
        if share in _complements(nodes, rest) or rest in _complements(nodes, share):
            return _Between(value, other)
    for share, difference in (nodes[product].inputs, nodes[product].inputs[::-1]):
        apart = nodes[difference]
        is_share = nodes[share].operator == SIGMOID and nodes[share].shape == node.shape
        if not is_share or apart.operator != SUB or apart.shape != node.shape or nodes[own].shape != node.shape:
            continue
        if apart.arguments.get("alpha", 1) != 1 or apart.inputs[-1] != own or not apart.is_variable("other"):
            continue
        if len(apart.inputs) == 2:
            return _Between(own, apart.inputs[0]) if nodes[apart.inputs[0]].shape == node.shape else None
        constant = apart.arguments["self"]
        if isinstance(constant, Tensor) and constant.dim() <= len(node.shape):
            return _Between(own, constant)
    return None


def _halves(nodes: Mapping[str, Node], name: str, shape: tuple[int, ...]) -> list[tuple[str, str]]:
    """Return the operands of a product in both orders; none if they are not all of this shape."""
    node = nodes[name]
    if node.operator != PRODUCT or node.input_shapes != (shape, shape):
        return []
    return [(node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])]


def _complements(nodes: Mapping[str, Node], name: str) -> tuple[str, ...]:
    """Return the sigmoid that a value is 1 less."""
    node = nodes[name]
    if node.operator != SUB or not node.is_variable("other") or node.arguments.get("alpha", 1) != 1:
        return ()
    is_one = len(node.inputs) == 1 and bool((torch.as_tensor(node.arguments["self"]) == 1).all())
    return node.inputs if is_one and nodes[node.inputs[0]].operator == SIGMOID else ()


def _log_sum(nodes: Mapping[str, Node], node: Node) -> Range | None:
    total = nodes[node.inputs[0]]
    if total.operator != SUM or nodes[total.inputs[0]].operator != EXP:
        return None
    powers = nodes[total.inputs[0]]
    return LogSumExp(powers.inputs[0], _axes(total), bool(total.arguments["keepdim"]))


def _softmax(nodes: Mapping[str, Node], node: Node, whole: str, inverse: str) -> Range | None:
    total = nodes[nodes[inverse].inputs[0]] if nodes[inverse].operator == RECIPROCAL else None
    if total is None or total.operator != SUM or total.inputs != (whole,) or not total.arguments["keepdim"]:
        return None
    powers, weights = nodes[whole], None
    if powers.operator == MUL and len(powers.inputs) == 1:
        weights = powers.arguments["other" if powers.is_variable("self") else "self"]
        if not isinstance(weights, Tensor) or bool((weights < 0).any()) or weights.dim() > len(powers.shape):
            return None
        powers = nodes[powers.inputs[0]]
    if powers.operator != EXP or powers.shape != node.shape:
        return None
    return Softmax(powers.inputs[0], _axes(total), weights)


def _normalised(nodes: Mapping[str, Node], node: Node, whole: str, inverse: str) -> Range | None:
    """Return the range of ``x / √(c Σ x² + ε)``, at most ``1/√c``, and less if the values add up to 0; with ε = 0
    it has no value if all x are 0.
    """
    if nodes[inverse].operator != RSQRT or node.shape != nodes[whole].shape:
        return None
    sized, exists = nodes[nodes[inverse].inputs[0]], False
    if sized.operator == ADD and len(sized.inputs) == 1:
        constant = torch.as_tensor(sized.arguments["other" if sized.is_variable("self") else "self"])
        if bool((constant < 0).any()) or sized.arguments.get("alpha", 1) != 1:
            return None
        sized, exists = nodes[sized.inputs[0]], bool((constant > 0).all())
    if sized.operator not in {SUM, MEAN} or not sized.arguments["keepdim"]:
        return None
    squares, axes = nodes[sized.inputs[0]], _axes(sized)
    if squares.operator != POWER or squares.arguments["exponent"] != 2 or squares.inputs != (whole,):
        return None
    count = torch.Size(squares.shape[axis] for axis in axes).numel()
    limit = sqrt(count) if sized.operator == MEAN else 1.0
    return _WithinLimit(limit * sqrt((count - 1) / count) if _is_centred(nodes, nodes[whole], axes) else limit, exists)


def _is_centred(nodes: Mapping[str, Node], node: Node, axes: tuple[int, ...]) -> bool:
    if node.operator != SUB or len(node.inputs) != 2 or node.arguments.get("alpha", 1) != 1:
        return False
    own, mean = node.inputs[0], nodes[node.inputs[1]]
    return mean.operator == MEAN and mean.inputs == (own,) and _axes(mean) == axes


def _axes(node: Node) -> tuple[int, ...]:
    """Return the dimensions of an instance that a sum or a mean goes over."""
    rank = len(node.input_shapes[0]) + 1
    return tuple(sorted(dim % rank - 1 for dim in node.arguments["dim"]))
