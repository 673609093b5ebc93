"""Whether the backward that is about to run was compiled."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import Node

COMPILED_NODE = "CompiledFunctionBackward"


def compiled_backwards(loss: Tensor) -> int:
    """Nodes of the autograd graph behind ``loss`` that run a backward graph compiled by AOTAutograd."""
    return sum(COMPILED_NODE in node.name() for node in _nodes(loss.grad_fn))


def _nodes(root: Node | None) -> set[Node]:
    seen: set[Node] = set()
    pending = [root] if root is not None else []
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending.extend(before for before, _ in node.next_functions if before is not None)
    return seen
