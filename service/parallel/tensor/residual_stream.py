"""Defines the division of a tensor-parallel transformer's residual stream over the ranks between its layers.

Replicated, every rank repeats norms and sums over all tokens (Megatron-LM; Shoeybi et al., 2019). With sequence
parallelism each rank has a part of the tokens there, which divides that work and its activations by tp and costs
the same communication: an all-reduce is a reduce-scatter and an all-gather (Korthikanti et al., 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from service.parallel.collectives import (
    copy_to_group,
    gather_with_reduce_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
    scatter_to_group,
)
from service.parallel.mesh import SINGLE, Axis
from service.parallel.tensor.placement import is_exporting


class ResidualStream(Protocol):
    """Ways between the stream and layers that are divided over tensor-parallel ranks, on ``(batch, sequence, dim)``."""

    def enter(self, x: Tensor) -> Tensor:
        """Lead from the stream to column-parallel layers: all tokens, replicated."""

    def leave(self, partial: Tensor) -> Tensor:
        """Lead from row-parallel layers, whose results are to be summed over the ranks, to the stream."""

    def divide(self, x: Tensor) -> Tensor:
        """Divide a replicated value into the stream."""

    def shared(self, weight: Tensor) -> Tensor:
        """Return a replicated parameter, to use on this rank's part of the stream; its gradient is complete on all."""


@dataclass(frozen=True)
class Replicated:
    """All tokens on every rank."""

    axis: Axis = SINGLE

    def enter(self, x: Tensor) -> Tensor:
        return copy_to_group(x, self.axis.group)

    def leave(self, partial: Tensor) -> Tensor:
        return reduce_from_group(partial, self.axis.group)

    def divide(self, x: Tensor) -> Tensor:
        return x

    def shared(self, weight: Tensor) -> Tensor:
        return weight


@dataclass(frozen=True)
class SequenceSharded:
    """A part of the tokens on each rank, as ``(batch, sequence / tp, dim)``; the sequence divides by tp.

    The batch's tokens are cut in row-major order, so a rank's part is contiguous in every collective; its
    second dimension counts tokens and says nothing of their positions. In an exported graph each sequence is
    cut by itself: its reader must see that instances of a batch stay apart.
    """

    axis: Axis

    def enter(self, x: Tensor) -> Tensor:
        if is_exporting():
            return gather_with_reduce_from_group(x, 1, self.axis.group, self.axis.size)
        batch, tokens, dim = x.shape
        whole = gather_with_reduce_from_group(x.flatten(0, 1), 0, self.axis.group, self.axis.size)
        return whole.view(batch, tokens * self.axis.size, dim)

    def leave(self, partial: Tensor) -> Tensor:
        return self._cut(partial, reduce_scatter_to_group)

    def divide(self, x: Tensor) -> Tensor:
        return self._cut(x, scatter_to_group)

    def _cut(self, x: Tensor, scatter: Callable[[Tensor, int, str, int], Tensor]) -> Tensor:
        if is_exporting():
            return scatter(x, 1, self.axis.group, self.axis.size)
        batch, tokens, dim = x.shape
        own = scatter(x.flatten(0, 1), 0, self.axis.group, self.axis.size)
        return own.view(batch, tokens // self.axis.size, dim)

    def shared(self, weight: Tensor) -> Tensor:
        return copy_to_group(weight, self.axis.group)
