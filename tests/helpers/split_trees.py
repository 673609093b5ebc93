"""Trees of splits, as a rank reports them."""

from __future__ import annotations

from typing import Any

import torch

from service.verification.bab.split_tree import SearchTree


def tree_of(rounds: int, most: int = 400) -> SearchTree:
    """A tree in which each round splits every domain that waits, and proves one half of all but the first round's."""
    tree = SearchTree("activation splitting", 0, most, lambda number: f"relu_{number // 4} [{number % 4}]")
    waiting = tree.plant(torch.tensor([-1.0]))
    for depth in range(rounds):
        count = len(waiting)
        margins = torch.full((2, count), -1.0 / (depth + 2))
        halves = tree.split(waiting, torch.full((count,), depth), torch.zeros(count), margins).flatten()
        proved = min(depth, 1)
        tree.record_proofs(halves[:proved], torch.full((proved,), 0.25))
        waiting = halves[proved:]
    return tree


def tree_event(instance: int, *trees: SearchTree, **changes: Any) -> dict[str, Any]:
    event = {"type": "tree", "time": 1.0, "rank": 0, "instance": instance, "domains": 10, "seconds": 1.5, "ranks": 1}
    return {**event, "searches": [tree.as_dict() for tree in trees], **changes}
