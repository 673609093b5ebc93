"""The interface of rows that hold fewer numbers than a dense tensor ``(batch or 1, rows, *shape)``."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class StructuredRows(ABC):
    """Coefficients of some rows on one node's value.

    Operators and relaxations name the representations that they take (see :mod:`service.bounds.linear.propagation`);
    before all others the rows are made wider, where that is possible, and else dense.
    """

    @abstractmethod
    def dense(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return the rows as ``(batch or 1, rows, *shape)``, in the dtype and on the device of ``like``."""

    def is_worthwhile(self, shape: tuple[int, ...]) -> bool:
        """Return whether rows over a value of this shape take less work than dense ones."""
        return True

    def wider(self, shape: tuple[int, ...], like: Tensor) -> StructuredRows | None:
        """Return these rows in the next more general representation; ``None`` where only dense rows are left."""
        return None

    def plus(self, other: StructuredRows) -> StructuredRows | None:
        """Return the sum with rows of the same representation; ``None`` where it must be made of dense rows."""
        return None
