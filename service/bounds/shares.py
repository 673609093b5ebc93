"""Rows of a backward pass divided over the tensor-parallel ranks: each has a share of them where values are replicated.

The analogue of sequence parallelism: a reduce-scatter over the rows where a region begins and an all-gather where it
ends move what one all-reduce would. Coefficients, and the work on them, are divided by the ranks on both sides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from service.bounds.exchange import Exchange
from service.bounds.operators.base import Coefficients, UnitRows


def filled(rows: Coefficients, ranks: int) -> Coefficients:
    """As many rows for each rank: filled up with zeros, or with repeated entries."""
    if isinstance(rows, UnitRows):
        missing = -rows.index.shape[1] % ranks
        return UnitRows(torch.cat([rows.index, rows.index[:, :1].expand(-1, missing)], dim=1), rows.mirrored)
    missing = -rows.shape[1] % ranks
    return torch.cat([rows, rows.new_zeros(rows.shape[0], missing, *rows.shape[2:])], dim=1) if missing else rows


def asked(bounds: Tensor, rows: Coefficients) -> Tensor:
    """Of the bounds of filled rows those of ``rows``."""
    if isinstance(rows, UnitRows) and rows.mirrored:
        wanted = rows.index.shape[1]
        return torch.cat([half[:, :wanted] for half in bounds.chunk(2, dim=1)], dim=1)
    return bounds[:, : rows.count if isinstance(rows, UnitRows) else rows.shape[1]]


def own_share(rows: Coefficients, shape: tuple[int, ...], like: Tensor, exchange: Exchange) -> Tensor:
    """This rank's rows of common ones, ``(batch or 1, share, *shape)``; a gradient of common rows is gathered."""
    if isinstance(rows, Tensor):
        return exchange.own(rows, 1)
    index = torch.cat([rows.index, rows.index], dim=1) if rows.mirrored else rows.index
    sign = torch.ones_like(index, dtype=like.dtype)
    sign[:, rows.index.shape[1] :] = -1
    mine = exchange.own_range(index.shape[1])
    size = int(torch.Size(shape).numel())
    dense = torch.zeros(len(index), mine.stop - mine.start, size, dtype=like.dtype, device=like.device)
    dense.scatter_(2, index[:, mine].unsqueeze(2), sign[:, mine].unsqueeze(2))
    return dense.reshape(*dense.shape[:2], *shape)
