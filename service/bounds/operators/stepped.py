"""Functions that jump, for attacks: wherever they have a gradient, it is 0."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor


class Stepped(ABC):
    """An operator that jumps where a value, its argument ``decided_by``, goes from one side of a step to the other."""

    decided_by: ClassVar[str]

    @abstractmethod
    def side(self, value: Tensor) -> Tensor:
        """Return a number for each entry of that value that changes from one side of a step to the other."""

    @abstractmethod
    def ramp(self, arguments: Mapping[str, Tensor]) -> Tensor:
        """Return the function with a gradient as if its steps were ramps, by its arguments' names."""


def passed_on(value: Tensor) -> Tensor:
    """Return 0 with the gradient of ``value``, where that is finite."""
    return torch.where(value.isfinite(), value - value.detach(), torch.zeros_like(value))
