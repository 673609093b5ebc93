"""A property as boxes and linear inequalities on the output, instance by instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from service.bounds.interval import Interval


class PropertyError(ValueError):
    """The property does not fit the model or the data."""


@dataclass(frozen=True, eq=False)
class Question:
    """A batch of instances: does ``rows · y ≥ thresholds`` hold for every row and every input of the box?

    ``box`` ``(batch, features)``; ``rows`` ``(batch, rows, outputs)``; ``thresholds`` ``(batch, rows)``;
    ``witnesses`` ``(batch, features)``, one input of each box at which to look for a violation first.
    """

    instances: Sequence[int]
    box: Interval
    rows: Tensor
    thresholds: Tensor
    witnesses: Tensor


class Property(Protocol):
    """All instances of one specification. ``eps`` is the radius, where there is one."""

    @property
    def count(self) -> int: ...

    @property
    def eps(self) -> float | None: ...

    @property
    def has_labels(self) -> bool:
        """Whether the witnesses are labelled samples, so that their violations measure accuracy."""

    def ask(self, instances: Sequence[int], like: Tensor) -> Question:
        """The question of these instances, in the dtype and on the device of ``like``."""
