"""Inputs at which a model is compared with onnxruntime: of the property's own boxes, and where its pieces are taken."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from service.bounds.graph import Graph
from service.bounds.graph_module import ExecutableGraph
from service.verification.properties import Property

BOXES, EACH = 4, 6
"""The boxes of a property that points are drawn from, and the points of each."""
CANDIDATES, MOST_NUMBERS, CHOSEN = 256, 2**22, 12
"""How many points are tried for the pieces that they take, in how many numbers at once, and how many are kept."""


@torch.no_grad()
def points(asked: Property, instances: Sequence[int], like: Tensor, graph: Graph | None = None) -> Tensor:
    """Return inputs ``(n, features)`` in the dtype and on the device of ``like``: centres, corners and others.

    They are of the boxes of ``instances``, those that are about the model. With the ``graph`` of all of it there are
    some besides that take as many of its pieces as are found. All ranks draw the same.
    """
    instances = instances[:: max(1, len(instances) // BOXES)][:BOXES]
    boxes = [asked.batch([instance], like).box for instance in instances]
    generator = torch.Generator().manual_seed(0)
    drawn = [within(each.lower, each.upper, EACH, generator) for each in boxes]
    if graph is not None:
        count = min(CANDIDATES, MOST_NUMBERS // sum(node.size for node in graph.nodes)) // len(boxes)
        candidates = torch.cat([within(each.lower, each.upper, max(EACH, count), generator) for each in boxes])
        drawn.append(candidates[_covering(graph, candidates)])
    return torch.cat(drawn)


def within(lower: Tensor, upper: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return ``count`` points of a box ``(1, features)``: its centre, its two ends, corners, and points between."""
    shares = torch.rand(count, lower.shape[1], generator=generator, dtype=torch.float64)
    shares[3 : 3 + count // 3].round_()
    for index, share in enumerate((0.5, 0.0, 1.0)):
        shares[index] = share
    shares = shares.to(lower)
    return torch.minimum(torch.maximum(lower * (1 - shares) + upper * shares, lower), upper)


def _covering(graph: Graph, candidates: Tensor) -> list[int]:
    """Choose points one by one, each the one that takes most pieces which those before have not taken."""
    taken = _pieces(graph, candidates)
    chosen = list[int]()
    for _ in range(min(CHOSEN, len(candidates))):
        fresh = taken.sum(dim=1)
        best = int(fresh.argmax())
        if not fresh[best]:
            break
        chosen.append(best)
        taken = taken & ~taken[best]
    return chosen


def _pieces(graph: Graph, x: Tensor) -> Tensor:
    """Return what is true of values at points, bool ``(points, statements)``: their signs, and which of its operands a
    value is equal to. So pieces of activations and of extremes are told apart, whatever the operator.
    """
    statements = list[Tensor]()
    by_name, values = graph.by_name, dict[str, Tensor]()
    x = x.double()
    for name, value in ExecutableGraph(graph).to(x.device, x.dtype).steps(x.reshape(-1, *graph.input.shape)):
        values[name] = value
        positive = value.flatten(1) > 0
        statements += [positive, ~positive]
        operands = [values[each] for each in by_name[name].inputs]
        statements += [(each == value).flatten(1) for each in operands if each.shape == value.shape]
    return torch.cat(statements, dim=1)
