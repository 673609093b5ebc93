"""Shards rows and biases of a backward traversal over the ranks of a tensor-parallel group.

Where a value differs by rank, every rank has its own coefficients for common rows. Where a value is replicated, each
may have a share of the rows: the analogue of sequence parallelism. A reduce-scatter over the rows where a region
begins and an all-gather where it ends move as much data as one all-reduce would. Coefficients, and the work on them,
are divided by the ranks on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from service.bounds.graph import Node
from service.bounds.linear.propagation import Coefficients, InitialRows
from service.bounds.linear.rows.identity import IdentityRows
from service.bounds.network import Network
from service.bounds.rank_group import RankGroup

T = TypeVar("T")


class Pending(NamedTuple):
    """Coefficients that wait at a node.

    With ``own``, the rows belong only to this rank, and so do their values so far. With ``fresh``, nothing else holds
    the tensor, so that more may be added to it in place.
    """

    rows: Coefficients
    own: bool
    fresh: bool = False


@dataclass(frozen=True, eq=False)
class ByOwnership(Generic[T]):
    """The accounts of the terms that rows have collected: at ``replicated`` values, this rank's part at values
    that differ by rank (``partial``), and for rows that only this rank has (``own``).
    """

    replicated: T
    partial: T
    own: T


@dataclass(frozen=True, eq=False)
class RowSharding:
    """The policy of a traversal. ``divided``: each rank has a share of the rows outside of tensor-parallel regions."""

    network: Network
    divided: bool

    @property
    def ranks(self) -> int:
        return self.network.tp_group.axis.size

    def divides(self, name: str) -> bool:
        """Return whether each rank has a share of the rows at this node."""
        return self.divided and self.ranks > 1 and not self.network.is_own(name)

    def account(self, accounts: ByOwnership[T], name: str, own: bool) -> T:
        """Return the account that a node's terms are added to; ``own`` as for :class:`Pending`."""
        if own:
            return accounts.own
        return accounts.partial if self.network.is_own(name) else accounts.replicated

    def filled(self, rows: InitialRows) -> InitialRows:
        """Return equally many rows for each rank: padded with zeros, or with repeated entries."""
        if isinstance(rows, IdentityRows):
            missing = -rows.index.shape[1] % self.ranks
            return IdentityRows(torch.cat([rows.index, rows.index[:, :1].expand(-1, missing)], dim=1), rows.mirrored)
        missing = -rows.shape[1] % self.ranks
        return torch.cat([rows, rows.new_zeros(rows.shape[0], missing, *rows.shape[2:])], dim=1) if missing else rows

    def gathered(self, bounds: Tensor, rows: InitialRows) -> Tensor:
        """Return for ``rows`` the ranks' results for their shares of the padded rows."""
        everyone = self.network.tp_group.gather(bounds, 1)
        if isinstance(rows, IdentityRows) and rows.mirrored:
            wanted = rows.index.shape[1]
            return torch.cat([half[:, :wanted] for half in everyone.chunk(2, dim=1)], dim=1)
        return everyone[:, : rows.count if isinstance(rows, IdentityRows) else rows.shape[1]]

    def own_share(self, rows: InitialRows, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return this rank's share of common rows, ``(batch or 1, share, *shape)``; its gradient is gathered."""
        tp_group: RankGroup = self.network.tp_group
        if isinstance(rows, Tensor):
            return tp_group.own(rows, 1)
        index = torch.cat([rows.index, rows.index], dim=1) if rows.mirrored else rows.index
        sign = torch.ones_like(index, dtype=like.dtype)
        sign[:, rows.index.shape[1] :] = -1
        mine = tp_group.own_range(index.shape[1])
        size = int(torch.Size(shape).numel())
        dense = torch.zeros(len(index), mine.stop - mine.start, size, dtype=like.dtype, device=like.device)
        dense.scatter_(2, index[:, mine].unsqueeze(2), sign[:, mine].unsqueeze(2))
        return dense.reshape(*dense.shape[:2], *shape)

    def coefficients(self, node: Node, arrived: Pending, like: Tensor) -> tuple[Tensor, bool]:
        """Return dense coefficients, of this rank's share where rows are divided, and whether they are its own."""
        if arrived.own or not self.divides(node.name) or not isinstance(arrived.rows, InitialRows):
            return dense(node, arrived.rows, like), arrived.own
        return self.own_share(arrived.rows, node.shape, like), True

    def over_rows(self, node: Node, coefficients: Tensor, *, held_alone: bool, own: bool) -> Tensor:
        """Return coefficients over this rank's rows, or over all rows, where other ranks' rows are zero here."""
        if held_alone == own:
            return coefficients
        batch, rows = coefficients.shape[:2]
        everyone = coefficients.new_zeros(batch, rows * self.ranks, *node.shape)
        everyone[:, self.network.tp_group.own_range(everyone.shape[1])] = coefficients
        return everyone


def dense(node: Node, rows: Coefficients, like: Tensor) -> Tensor:
    """Return the rows of a node as ``(batch or 1, rows, *shape)``."""
    return rows if isinstance(rows, Tensor) else rows.dense(node.shape, like)
