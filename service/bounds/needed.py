"""Which entries of a network's values its output depends on, by its structure alone.

A classifier that reads one token asks nothing of the others after the last attention: what their entries are bounded by
affects no bound of the output.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from service.bounds.graph import Graph, Node, Repeated
from service.bounds.operators import LINEAR, NONLINEAR
from service.bounds.rank_group import RankGroup

ALONE = RankGroup()
DRAWS = 2
"""Random rows that go backward: an entry that matters would have to cancel to 0 in all of them to be missed."""


@torch.no_grad()
def needed_entries(graph: Graph, tp_group: RankGroup = ALONE, own: Collection[str] = ()) -> Mapping[str, Tensor]:
    """Return the entries that the output depends on, bool ``(n,)``, by the name of the value; only of values of which
    there are others, too.

    Of a graph that is divided over ranks all of them call it; ``own`` names the values of which each has a part.
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
    """Add to the entries of replicated values what other ranks have found: all must have as many rows."""
    everywhere = tp_group.sum(torch.cat([mask.flatten() for mask in masks.values()]).float()) > 0
    parts = torch.split(everywhere, [mask.numel() for mask in masks.values()])
    for mask, part in zip(masks.values(), parts, strict=True):
        mask.copy_(part.reshape(mask.shape))


class _Draws:
    """Random numbers above 0: the same on all ranks for values that all have, others on each for its own."""

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
    """Yield the entries of each input that some of these entries ``(*shape)`` depend on."""
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
