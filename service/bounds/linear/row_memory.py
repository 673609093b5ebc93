"""The size that a row of coefficients gets to on its way back, so that as many rows go together as memory takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from service.bounds.graph import Node
from service.bounds.linear.rows.patches import Pair, image_of
from service.bounds.linear.traversal import traverse_backward
from service.bounds.network import Network

PatchSize = Pair | None
"""Height and width of a row's patch; ``None`` for a whole row."""


def entries_of_a_row(network: Network, start: str, *, divided: bool = False) -> int:
    """Return the entries of the largest value between ``start`` and the input, or of the largest patch where rows stay
    in patches.

    They are what one tensor-parallel rank has for each row that all of them bound: its share of a divided value, and of
    a replicated one the whole, or a share of the rows where those are ``divided``.
    """
    image = image_of(network.nodes[start].shape) is not None and network.tp_group.axis.size == 1
    sizes = _RowSizes(network, network.tp_group.axis.size if divided else 1)
    nodes = network.graph.nodes[network.position[start] :: -1]
    traverse_backward(nodes, {start: (1, 1) if image else None}, sizes.propagate, sizes.join)
    return sizes.largest


@dataclass(eq=False)
class _RowSizes:
    """The arithmetic of sizes alone."""

    network: Network
    ranks: int
    largest: int = field(default=1)

    def propagate(self, node: Node, patch: PatchSize) -> Iterable[tuple[str, PatchSize]]:
        entries = _entries(node, patch)
        self.largest = max(self.largest, entries if self.network.is_own(node.name) else -(-entries // self.ranks))
        if patch is not None and node.name == self.network.entrance:
            return ()
        return [(name, _size_before(self.network, node, index, patch)) for index, name in enumerate(node.inputs)]

    @staticmethod
    def join(name: str, first: PatchSize, second: PatchSize) -> PatchSize:
        if first is None or second is None:
            return None
        return (max(first[0], second[0]), max(first[1], second[1]))


def _entries(node: Node, patch: PatchSize) -> int:
    image = image_of(node.shape)
    if patch is None or image is None:
        return node.size
    return min(node.size, image[0] * patch[0] * patch[1])


def _size_before(network: Network, node: Node, index: int, patch: PatchSize) -> PatchSize:
    if patch is None or image_of(node.input_shapes[index]) is None:
        return None
    return network.any_operator_of(node).patch_before(node, index, patch)
