"""Collectives of a group of ranks that bound one network.

The sums and gathers are the differentiable collectives of the core: the adjoint of each is its partner. A bound
that is optimised over slopes would otherwise be no bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from service.parallel.collectives import (
    copy_to_group,
    gather_from_group,
    gather_with_reduce_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
    scatter_to_group,
)
from service.parallel.mesh import SINGLE, Axis


@dataclass(frozen=True)
class RankGroup:
    """Collectives over ``axis``; every rank of the group calls the same ones in the same order."""

    axis: Axis = SINGLE

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum over the ranks, on all of them (gradient: identity)."""
        return reduce_from_group(partial.contiguous(), self.axis.group)

    def enter(self, replicated: Tensor) -> Tensor:
        """Return a replicated tensor for work that differs by rank: identity (gradient: all-reduce)."""
        return copy_to_group(replicated, self.axis.group)

    def gather(self, shard: Tensor, dim: int) -> Tensor:
        """Return shards of equal shape joined along ``dim`` in rank order (gradient: own slice)."""
        return gather_from_group(shard.contiguous(), dim, self.axis.group, self.axis.size)

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's slice along ``dim`` (gradient: gathered)."""
        return scatter_to_group(whole, dim, self.axis.group, self.axis.size)

    def join(self, shard: Tensor, dim: int) -> Tensor:
        """Gather like :meth:`gather`, for work that differs by rank (gradient: own slice of the sum)."""
        return gather_with_reduce_from_group(shard.contiguous(), dim, self.axis.group, self.axis.size)

    def own_sum(self, partial: Tensor, dim: int) -> Tensor:
        """Return this rank's slice along ``dim`` of the sum over the ranks (gradient: gathered)."""
        return reduce_scatter_to_group(partial, dim, self.axis.group, self.axis.size)

    def own_range(self, length: int) -> slice:
        """Return this rank's share of ``length`` gathered entries."""
        share = length // self.axis.size
        return slice(self.axis.rank * share, (self.axis.rank + 1) * share)

    def agree(self, replicated: Tensor) -> Tensor:
        """Return the first rank's values on every rank: decisions that compare them must not differ by a last
        bit.

        The gradient is the identity, since the values are the same but for that bit.
        """
        if self.axis.size == 1:
            return replicated
        agreed: Tensor = _Agree.apply(replicated, self)  # type: ignore[no-untyped-call]
        return agreed

    def largest(self, count: int, device: torch.device) -> int:
        """Return the largest of the ranks' numbers."""
        if self.axis.size == 1:
            return count
        counts = self.gather(torch.tensor([count], dtype=torch.int64, device=device), 0)
        return int(counts.max())

    def least(self, count: int, device: torch.device) -> int:
        """Return the smallest of the ranks' numbers."""
        return -self.largest(-count, device)

    def same_everywhere(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Return which tensors have the same content on every rank, judged by two float64 moments of their entries."""
        if self.axis.size == 1 or not tensors:
            return [True] * len(tensors)
        marks = torch.stack([_mark(tensor) for tensor in tensors])
        everyone = self.gather(marks.unsqueeze(0), 0)
        return [bool(equal) for equal in (everyone == everyone[0]).flatten(2).all(dim=2).all(dim=0)]


class _Agree(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replicated: Tensor, group: RankGroup) -> Tensor:
        return group.sum(replicated if group.axis.rank == 0 else torch.zeros_like(replicated))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


AT_ONCE = 2**22
"""Entries."""


def _mark(tensor: Tensor) -> Tensor:
    """Part by part: moments of large weights take no second copy of them."""
    flat, total = tensor.detach().reshape(-1), torch.zeros(2, dtype=torch.float64, device=tensor.device)
    for start in range(0, flat.numel(), AT_ONCE):
        values = flat[start : start + AT_ONCE].to(torch.float64)
        places = torch.arange(start + 1, start + 1 + len(values), dtype=torch.float64, device=tensor.device)
        total += torch.stack([values.sum(), (values * places.cos()).sum()])
    return total
