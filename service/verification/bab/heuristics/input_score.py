"""Defines the interface of a branching score for inputs, and its view of boxes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from service.bounds.planes import Planes

if TYPE_CHECKING:
    from service.verification.bab.specification import Specification


@dataclass(frozen=True)
class InputScore(ABC):
    """A score for every input of a batch of boxes; its fields are its settings."""

    @abstractmethod
    def scores(self, view: InputView) -> Tensor:
        """Return ``(n, features)`` in the bounds' dtype: the cost to the bounds of each unit of an input's width.

        The search multiplies it by the width, splits the input with the largest product, and halves that product for
        the next split.
        """


@dataclass(frozen=True, eq=False)
class InputView:
    """A batch of ``n`` bounded boxes, as a score sees them.

    ``planes`` bound the rows of ``specification`` from below, ``least`` ``(n, rows)`` is the proved lower bound
    of row − threshold in each box, and ``is_open`` ``(n, disjuncts)`` marks the unproved disjuncts.
    """

    specification: Specification
    planes: Planes
    least: Tensor
    is_open: Tensor
