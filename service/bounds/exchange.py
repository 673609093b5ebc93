"""What the ranks of a tensor-parallel group tell each other while they bound one network.

The sums and gathers are the differentiable collectives of the core: the adjoint of each is its partner, which a
bound that is optimised over slopes needs to stay a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
class Exchange:
    """Collectives over ``axis``; every rank of the group calls the same ones in the same order."""

    axis: Axis = SINGLE

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over the ranks, on all of them (gradient: identity)."""
        return reduce_from_group(partial.contiguous(), self.axis.group)

    def enter(self, replicated: Tensor) -> Tensor:
        """A replicated tensor used for work that differs by rank: identity (gradient: all-reduce)."""
        return copy_to_group(replicated, self.axis.group)

    def gather(self, shard: Tensor, dim: int) -> Tensor:
        """Shards of equal shape joined along ``dim`` in rank order (gradient: own slice)."""
        return gather_from_group(shard.contiguous(), dim, self.axis.group, self.axis.size)

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's slice along ``dim`` (gradient: gathered)."""
        return scatter_to_group(whole, dim, self.axis.group, self.axis.size)

    def join(self, shard: Tensor, dim: int) -> Tensor:
        """Like :meth:`gather`, for work that differs by rank (gradient: own slice of the sum)."""
        group, size = self.axis.group, self.axis.size
        return _by_rows(lambda part: gather_with_reduce_from_group(part.contiguous(), dim, group, size), shard, dim)

    def own_sum(self, partial: Tensor, dim: int) -> Tensor:
        """This rank's slice along ``dim`` of the sum over the ranks (gradient: gathered)."""
        group, size = self.axis.group, self.axis.size
        return _by_rows(lambda part: reduce_scatter_to_group(part, dim, group, size), partial, dim)

    def own_range(self, length: int) -> slice:
        """This rank's share of ``length`` gathered entries."""
        share = length // self.axis.size
        return slice(self.axis.rank * share, (self.axis.rank + 1) * share)

    def agree(self, replicated: Tensor) -> Tensor:
        """The first rank's values on every rank: what is decided by comparing them must not differ in a last bit.

        The gradient is the identity, since the values are the same but for that bit.
        """
        if self.axis.size == 1:
            return replicated
        agreed: Tensor = _Agree.apply(replicated, self)  # type: ignore[no-untyped-call]
        return agreed

    def largest(self, count: int, device: torch.device) -> int:
        """The largest of the ranks' numbers."""
        if self.axis.size == 1:
            return count
        counts = self.gather(torch.tensor([count], dtype=torch.int64, device=device), 0)
        return int(counts.max())

    def same_everywhere(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Which tensors have the same content on every rank, judged by two moments of their entries in float64."""
        if self.axis.size == 1 or not tensors:
            return [True] * len(tensors)
        marks = torch.stack([_mark(tensor) for tensor in tensors])
        everyone = self.gather(marks.unsqueeze(0), 0)
        return [bool(equal) for equal in (everyone == everyone[0]).flatten(2).all(dim=2).all(dim=0)]


LARGE, PARTS = 2**20, 4
"""Entries from which on a value's rows move in so many parts."""


def _by_rows(move: Callable[[Tensor], Tensor], rows: Tensor, dim: int) -> Tensor:
    """Rows ``(batch, rows, …)`` whose dimension ``dim`` moves; in parts where what moves is copied, and is large."""
    if dim < 2 or rows.numel() < LARGE or torch.is_grad_enabled():
        return move(rows)
    parts = torch.split(rows, -(-rows.shape[1] // PARTS), dim=1)
    first = move(parts[0])
    whole, done = first.new_empty(first.shape[0], rows.shape[1], *first.shape[2:]), 0
    for index, part in enumerate(parts):
        whole.narrow(1, done, part.shape[1]).copy_(move(part) if index else first)
        done += part.shape[1]
    return whole


class _Agree(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replicated: Tensor, exchange: Exchange) -> Tensor:
        return exchange.sum(replicated if exchange.axis.rank == 0 else torch.zeros_like(replicated))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _mark(tensor: Tensor) -> Tensor:
    values = tensor.detach().reshape(-1).to(torch.float64)
    positions = torch.arange(1, values.numel() + 1, dtype=torch.float64, device=values.device)
    return torch.stack([values.sum(), (values * positions.cos()).sum()])
