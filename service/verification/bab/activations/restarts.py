"""Says which disjuncts a search over activations begins anew once the bounds that all its domains share are tighter.

The domains that are open then were split for looser bounds, and each must still be split or bounded again. A new tree
begins at a root with a better margin, and chooses its splits by better bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from service.verification.bab.activations.domains import DomainPool
from service.verification.bab.search_group import SearchGroup

FEWER = 10.0
"""A new tree must be expected to get as far as the old one with so many times fewer domains."""


@dataclass(eq=False)
class FreshTrees:
    """``began`` are the margins ``(disjuncts,)`` at which the trees that are searched began, equal on all ranks."""

    group: SearchGroup
    began: Tensor

    @classmethod
    def of(cls, group: SearchGroup, pool: DomainPool, disjuncts: int, device: torch.device) -> FreshTrees:
        """Return those of trees that are roots in the ``pool`` of every rank."""
        return cls(group, group.agree(_least_of(pool, range(disjuncts), device)))

    def chosen(self, pool: DomainPool, disjuncts: Tensor, margins: Tensor) -> list[int]:
        """Return which of the open ``disjuncts`` ``(n,)`` begin anew at roots with ``margins`` ``(n,)``."""
        numbers = disjuncts.tolist()
        least = -self.group.most(-_least_of(pool, numbers, margins.device))
        opens = torch.tensor([pool.count_of(each) for each in numbers], dtype=torch.int64, device=margins.device)
        of_trees = zip(
            margins.tolist(),
            self.began[disjuncts].tolist(),
            least.tolist(),
            self.group.total(opens).tolist(),
            strict=True,
        )
        found = [index for index, tree in enumerate(of_trees) if is_fresh_tree_smaller(*tree)]
        self.began[disjuncts[found]] = margins[found].to(self.began)
        return found


def is_fresh_tree_smaller(root: float, began: float, reached: float, open_: int) -> bool:
    """Return whether a tree whose root has a margin of ``root`` would reach what one with ``open_`` domains has, that
    ``began`` lower, with a part of as many: as if every doubling of the domains gained as much.
    """
    if root > reached or not reached > began:
        return root > reached
    smaller: float = float(open_) ** ((root - began) / (reached - began))
    return smaller >= FEWER


def _least_of(pool: DomainPool, disjuncts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([pool.bound_of(each) for each in disjuncts], dtype=torch.float64, device=device)
