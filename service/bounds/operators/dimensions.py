"""Arguments that name dimensions, counted from 0 with the batch."""

from __future__ import annotations

from service.bounds.graph import Node


def dimension_of(node: Node) -> int:
    """Return the node's ``dim``, counted from 0 with the batch."""
    dimension = int(node.arguments["dim"])
    return dimension if dimension >= 0 else dimension + len(node.shape) + 1
