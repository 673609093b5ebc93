"""Checks whether the backwards that a program runs were compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from service.torch_internals.table import internal

BACKWARD = "torch.autograd._engine_run_backward"
"""Every backward calls it, however the program names or imports the function with which it asks for one."""
_COMPILED_NODE = "CompiledFunctionBackward"


@contextmanager
def watched_backwards() -> Iterator[list[int]]:
    """Count, for each backward within, the nodes of its autograd graph that run a graph compiled by AOTAutograd."""
    counts: list[int] = []
    run = internal(BACKWARD)

    def counted(roots: Sequence[Tensor | GradientEdge], *arguments: Any, **keywords: Any) -> Any:
        counts.append(sum(_COMPILED_NODE in node.name() for node in _nodes(roots)))
        return run(roots, *arguments, **keywords)

    with patch(BACKWARD, counted):
        yield counts


def _nodes(roots: Sequence[Tensor | GradientEdge]) -> set[Node]:
    seen: set[Node] = set()
    found = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    pending = [node for node in found if node is not None]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending.extend(before for before, _ in node.next_functions if before is not None)
    return seen
