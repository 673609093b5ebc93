"""Rows of a constant matrix, read where they stand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.linear.rows.structured import StructuredRows


@dataclass(frozen=True, eq=False)
class GatheredRows(StructuredRows):
    """Rows of a constant ``matrix`` ``(m, n)``: those that ``index`` ``(batch or 1, rows)`` names.

    With ``mirrored`` their negatives follow.
    """

    matrix: Tensor
    index: Tensor
    mirrored: bool

    @property
    def count(self) -> int:
        return self.index.shape[1] * (2 if self.mirrored else 1)

    def dense(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        rows = self.matrix[self.index]
        rows = torch.cat([rows, -rows], dim=1) if self.mirrored else rows
        return rows.reshape(*rows.shape[:2], *shape)
