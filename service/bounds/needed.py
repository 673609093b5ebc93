"""Which entries of a network's values its output depends on, by its structure alone.

A classifier that reads one token asks nothing of the others after the last attention: what their entries are bounded by
affects no bound of the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from service.bounds.graph import Graph, Node, Repeated
from service.bounds.operators import LINEAR, NONLINEAR
from service.bounds.rank_group import RankGroup

DRAWS = 2
"""Random rows that go backward: an entry that matters would have to cancel to 0 in all of them to be missed."""


@torch.no_grad()
def needed_entries(graph: Graph) -> Mapping[str, Tensor]:
    """Return the entries that the output depends on, bool ``(n,)``, by the name of the value; only of values of which
    there are others, too.

    The graph is not divided over ranks.
    """
    like, generator = _like(graph), torch.Generator().manual_seed(0)
    masks = {graph.output.name: torch.ones(graph.output.shape, dtype=torch.bool, device=like.device)}
    for node in reversed(graph.nodes[1:]):
        for name, reached in zip(node.inputs, _before(node, masks[node.name], like, generator), strict=True):
            masks[name] = masks[name] | reached if name in masks else reached
    return {name: mask.flatten() for name, mask in masks.items() if not bool(mask.all())}


def _before(node: Node, mask: Tensor, like: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the entries of each input that some of these entries ``(*shape)`` depend on."""
    if node.operator in NONLINEAR:
        yield from NONLINEAR[node.operator].needed_of(node, mask)
        return
    drawn = 0.5 + torch.rand(1, DRAWS, *node.shape, generator=generator, dtype=like.dtype)
    step = LINEAR[node.operator].backward(node, drawn.to(like.device) * mask, RankGroup())
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
