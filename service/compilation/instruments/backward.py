"""Checks whether the backwards that a program runs were compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

_COMPILED_NODE = "CompiledFunctionBackward"


@contextmanager
def watched_backwards() -> Iterator[list[int]]:
    """Count, for each backward within, the nodes of its autograd graph that run a graph compiled by AOTAutograd.

    ``Tensor.backward`` and pipelines call ``torch.autograd`` too.
    """
    counts: list[int] = []

    def counting(run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(roots: Any, *arguments: Any, **keywords: Any) -> Any:
            one = isinstance(roots, Tensor | GradientEdge)  # an edge is a tuple too
            counts.append(sum(_COMPILED_NODE in node.name() for node in _nodes([roots] if one else roots)))
            return run(roots, *arguments, **keywords)

        return counted

    watched = torch.autograd
    with (
        patch.object(watched, "backward", counting(watched.backward)),
        patch.object(watched, "grad", counting(watched.grad)),
    ):
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
