"""Ranges of expectations under a softmax: a constant linear function of shares that add up to one.

Detectors predict a distance as the mean of bins, weighted by a softmax over their scores. Bounds of the shares one by
one forget that they add up to one. The range over a box of scores is exact: the mean ``Σ w_i exp(x_i) / Σ exp(x_j)``
rises with the score of each weight above it and falls with the others, so that it is largest where the scores of the
largest weights are at their upper ends and the rest at their lower ends, for one of the n − 1 ways to divide them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from service.bounds.graph import Graph, Node
from service.bounds.interval import Interval
from service.bounds.operators import OPERATORS
from service.bounds.operators.broadcasting import operand
from service.bounds.operators.convolution import Convolution
from service.bounds.operators.linear import AffineOperator
from service.bounds.operators.matmul import MatrixFromLeft
from service.bounds.operators.moves import Expand, Permute, Reshape, Select, Slice
from service.bounds.operators.mul import Multiple
from service.bounds.operators.sum import Mean, Sum
from service.bounds.ranges import Range, Softmax, ranges_of
from service.bounds.rank_group import RankGroup

MOST_BINS, MOST_WEIGHTED = 128, 2**22
"""The most shares of a sum, and the most weighted shares of one value, whose range is computed."""
_MOVES = (Expand, Permute, Reshape, Select, Slice)


@dataclass(frozen=True, eq=False)
class Expectation(Range):
    """``Σ_i weights_i · share_i + bias`` of softmax shares of ``scores``.

    ``places`` ``(sums, n)`` has the scores of each sum in the flattened instance; ``weights`` are ``(sums or 1,
    outputs, n)``, ``bias`` ``(outputs,)`` or none. The value is ``(*kept, outputs)`` with its last dimension moved to
    ``at``. ``shares`` names the softmax.
    """

    softmax: Softmax
    shares: str
    places: Tensor
    weights: Tensor
    bias: Tensor | None
    kept: tuple[int, ...]
    at: int

    def narrowed(self, found: Interval, known: Mapping[str, Interval]) -> Interval:
        if (given := known.get(self.softmax.scores)) is None:
            return found
        scores = self.softmax.weighted(given).map(self._of_sums)
        weights = self.weights.to(scores.lower)
        most, least = _largest_mean(scores, weights), -_largest_mean(scores, -weights)
        eps, count = torch.finfo(weights.dtype).eps, weights.shape[-1]
        # The powers' own errors and those of two sums, times how far apart the weights are.
        slack = (4 * count + 32) * eps * (weights.amax(dim=-1) - weights.amin(dim=-1))
        if self.bias is not None:
            bias = self.bias.to(weights)
            slack = slack + 4 * eps * bias.abs()
            least, most = least + bias, most + bias
        own = Interval(least - slack - 4 * eps * least.abs(), most + slack + 4 * eps * most.abs())
        own = own.map(lambda end: end.reshape(-1, *self.kept, weights.shape[1]).movedim(-1, self.at + 1))
        own = own.map(lambda end: end.reshape(found.lower.shape))
        lower = torch.where(own.lower.isnan(), found.lower, own.lower)
        return Interval(lower, torch.where(own.upper.isnan(), found.upper, own.upper)).meet(found)

    def _of_sums(self, end: Tensor) -> Tensor:
        """Return the scores of each sum, ``(batch, sums, 1, n)``."""
        places = self.places.to(end.device)
        return end.flatten(1).index_select(1, places.flatten()).reshape(len(end), len(places), 1, -1)


def _largest_mean(scores: Interval, weights: Tensor) -> Tensor:
    """Return the largest mean ``(batch, sums, outputs)`` of weights; the number of powers is at least 1."""
    least = weights.amin(dim=-1)
    above, rank = weights - least.unsqueeze(-1), weights.argsort(dim=-1).argsort(dim=-1)
    found = scores.lower.new_zeros(())
    for lower in range(1, weights.shape[-1]):
        x = torch.where(rank < lower, scores.lower, scores.upper)
        powers = (x - x.amax(dim=-1, keepdim=True)).exp()
        found = torch.maximum(found, (powers * above).sum(dim=-1) / powers.sum(dim=-1))
    return least + found


def expectations_of(graph: Graph) -> dict[str, Expectation]:
    """Return the ranges of those of a graph's nodes that are expectations under a softmax, by name."""
    nodes, found = graph.by_name, dict[str, Expectation]()
    softmaxes = {name: each for name, each in ranges_of(graph).items() if isinstance(each, Softmax)}
    held = {name: (name, torch.arange(nodes[name].size, dtype=torch.float64)) for name in softmaxes}
    for node in graph.nodes[1:]:
        if len(node.inputs) != 1 or node.name in held or node.inputs[0] not in held:
            continue
        first, places = held[node.inputs[0]]
        if isinstance(OPERATORS[node.operator], _MOVES):
            held[node.name] = first, _move_places(node, places)
        else:
            for each in _sums(graph, node, places.reshape(node.input_shapes[0])):
                summed = _expectation(softmaxes[first], nodes[first], each)
                if summed is not None:
                    found[each.node.name] = summed
    return found


def _move_places(node: Node, places: Tensor) -> Tensor:
    device = next((each.device for each in node.arguments.values() if isinstance(each, Tensor)), places.device)
    point = Interval.point(places.to(device).reshape(1, *node.input_shapes[0]))
    return OPERATORS[node.operator].interval(node, [point], RankGroup()).lower.flatten().cpu()


@dataclass(frozen=True, eq=False)
class _WeightedSum:
    """A node that adds up its input along one dimension; ``places`` ``(*kept, n)`` are those of the shares."""

    node: Node
    places: Tensor
    weights: Tensor
    bias: Tensor | None
    at: int


def _sums(graph: Graph, node: Node, held: Tensor) -> Iterator[_WeightedSum]:
    """Yield the weighted sums that a node is, or that are of it, in any form in which a model may spell them."""
    operator = OPERATORS[node.operator]
    if isinstance(operator, AffineOperator):
        layer = operator.read(node)
        if layer.weight.ndim == 2:
            yield _WeightedSum(node, held, layer.weight.unsqueeze(0), layer.bias, held.dim() - 1)
    elif isinstance(operator, MatrixFromLeft):
        matrix = node.constant("self")
        if matrix.ndim == 2:
            yield _WeightedSum(node, held.movedim(-2, -1), matrix.unsqueeze(0), None, held.dim() - 2)
    elif isinstance(operator, Convolution):
        weight = node.constant("weight")
        if held.dim() > 1 and node.shape[1:] == node.input_shapes[0][1:] and _is_of_points(node, weight):
            bias = node.arguments["bias"]
            yield _WeightedSum(node, held.movedim(0, -1), weight.flatten(1).unsqueeze(0), bias, 0)
    elif type(operator) is Multiple and node.shape == node.input_shapes[0]:
        factor = operand(node, "other" if node.is_variable("self") else "self", torch.empty(0, dtype=torch.float64))
        for user in graph.nodes:
            if user.inputs == (node.name,) and isinstance(OPERATORS[user.operator], Sum):
                yield from _weighted(user, held, factor.expand(1, *node.shape)[0])


def _weighted(total: Node, held: Tensor, factor: Tensor) -> Iterator[_WeightedSum]:
    """Yield the sum along one dimension of a product with a constant."""
    over = [int(each) % (held.dim() + 1) - 1 for each in total.arguments["dim"]]
    if len(over) == 1 and over[0] >= 0 and not isinstance(OPERATORS[total.operator], Mean):
        weights = factor.movedim(over[0], -1).reshape(-1, 1, held.shape[over[0]])
        yield _WeightedSum(total, held.movedim(over[0], -1), weights, None, held.dim() - 1)


def _is_of_points(node: Node, weight: Tensor) -> bool:
    """Return whether a convolution combines the channels of each point alone."""
    is_plain = node.arguments["groups"] == 1 and not node.arguments.get("transposed", False)
    is_plain &= not any(node.arguments["padding"])
    return is_plain and weight[0, 0].numel() == 1 and weight.shape[1] == node.input_shapes[0][0]


def _expectation(softmax: Softmax, shares: Node, total: _WeightedSum) -> Expectation | None:
    """Return the range, if every sum goes once over all shares that add up to one."""
    *kept, count = total.places.shape
    (axis,) = softmax.axes if len(softmax.axes) == 1 else (None,)
    if axis is None or not 1 < count <= MOST_BINS or shares.shape[axis] != count:
        return None
    if prod(kept) * total.weights.shape[1] * count > MOST_WEIGHTED or total.weights.requires_grad:
        return None
    places = total.places.reshape(-1, count).long()
    behind = prod(shares.shape[axis + 1 :])
    along, group = places // behind % count, places // (behind * count) * behind + places % behind
    is_one_sum = bool((along.sort(dim=-1).values == torch.arange(count)).all()) and bool((group == group[:, :1]).all())
    if not is_one_sum:
        return None
    return Expectation(softmax, shares.name, places, total.weights, total.bias, tuple(kept), total.at)
