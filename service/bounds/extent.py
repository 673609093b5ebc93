"""How large a row of coefficients gets on its way back, so that as many rows walk at once as memory takes."""

from __future__ import annotations

from service.bounds.graph import Node
from service.bounds.network import Network
from service.bounds.operators import OPERATORS
from service.bounds.windows import Pair, image_of

Window = Pair | None
"""Height and width of a row's window; ``None`` for a whole row."""


def entries_of_a_row(network: Network, start: str, *, divided: bool = False) -> int:
    """Of the largest value between ``start`` and the input, or of the largest window where rows stay in windows.

    What one tensor-parallel rank has for each row that all of them walk: its share of a divided value, and of a
    replicated one the whole, or a share of the rows where those are ``divided``.
    """
    ranks = network.exchange.axis.size if divided else 1
    image = image_of(network.nodes[start].shape) is not None and network.exchange.axis.size == 1
    waiting: dict[str, Window] = {start: (1, 1) if image else None}
    most = 1
    for node in network.graph.nodes[network.position[start] :: -1]:
        if node.name not in waiting:
            continue
        window = waiting.pop(node.name)
        most = max(most, _entries(node, window) if network.is_own(node.name) else -(-_entries(node, window) // ranks))
        if window is not None and node.name == network.entrance:
            continue
        for index, name in enumerate(node.inputs):
            earlier = _earlier(node, index, window)
            waiting[name] = _around(waiting[name], earlier) if name in waiting else earlier
    return most


def _entries(node: Node, window: Window) -> int:
    image = image_of(node.shape)
    if window is None or image is None:
        return node.size
    return min(node.size, image[0] * window[0] * window[1])


def _earlier(node: Node, index: int, window: Window) -> Window:
    if window is None or image_of(node.input_shapes[index]) is None:
        return None
    return OPERATORS[node.operator].window_before(node, index, window)


def _around(first: Window, second: Window) -> Window:
    if first is None or second is None:
        return None
    return (max(first[0], second[0]), max(first[1], second[1]))
