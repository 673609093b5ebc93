"""Represents rows by fewer numbers than a dense tensor ``(batch or 1, rows, *shape)``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class StructuredRows(ABC):
    """Coefficients of some rows on one node's value.

    Operators and relaxations name the representations that they take (see
    :mod:`service.bounds.linear.propagation`); before any other, rows are made more general if possible, and
    else dense.
    """

    @abstractmethod
    def dense(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return the rows as ``(batch or 1, rows, *shape)``, in the dtype and on the device of ``like``."""

    def is_worthwhile(self, shape: tuple[int, ...]) -> bool:
        """Return whether rows over a value of this shape take less work than dense ones."""
        return True

    def wider_kind(self, shape: tuple[int, ...]) -> type[StructuredRows] | None:
        """Return the next more general representation; ``None`` if only dense rows are left."""
        return None

    def wider(self, shape: tuple[int, ...], like: Tensor) -> StructuredRows | None:
        """Return these rows in that representation, if there is one."""
        return None

    def plus(self, other: StructuredRows) -> StructuredRows | None:
        """Return the sum with rows of the same representation; ``None`` if it needs dense rows."""
        return None


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
