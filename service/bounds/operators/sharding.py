"""The division of values and layers over tensor-parallel ranks (Megatron-LM, Shoeybi et al., 2019)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from service.bounds.graph import Node, Repeated


@dataclass(frozen=True)
class Cut:
    """A value divided along ``dim`` of an instance: ``length`` entries, ``share`` of them on each rank.

    If ``share`` times the ranks exceeds ``length``, the last ranks' shares end with padding.
    """

    dim: int
    length: int
    share: int

    def is_padded(self, ranks: int) -> bool:
        return self.share * ranks != self.length

    def local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a rank's part of ``shape``."""
        return (*shape[: self.dim], self.share, *shape[self.dim + 1 :])

    @staticmethod
    def of(node: Node, dim: int, ranks: int) -> Cut:
        length = node.shape[dim]
        return Cut(dim, length, -(-length // ranks))


@dataclass(frozen=True)
class Whole:
    """The output stays whole on every rank, ``because`` the ranks would have to communicate."""

    because: str


@dataclass(frozen=True)
class Layer:
    """A product with a constant ``weight`` that may become column- or row-parallel.

    A rank's part is the operator ``overload`` with ``arguments``, ``weight`` and ``bias``. Its outputs are
    divided along ``output_dim`` of an instance and ``weight_out`` of the weight, its inner dimension along
    ``input_dim`` and ``weight_in``.
    """

    overload: str
    arguments: Mapping[str, Any]
    weight: Tensor
    bias: Tensor | None
    output_dim: int
    input_dim: int
    weight_out: int
    weight_in: int


Share = Callable[[Tensor, int, Cut, float], Tensor]
"""``(constant, dim, cut, padding)`` to this rank's share of a constant whose dimension ``dim`` is divided."""


def shared_operand(value: Any, node: Node, cut: Cut, share: Share, padding: float = 0.0) -> Any:
    """Return a constant operand's share if it is as long as the value and not broadcast along the cut."""
    if isinstance(value, Repeated):
        return Repeated(shared_operand(value.value, node, cut, share, padding))
    dim = cut.dim - len(node.shape)
    if not isinstance(value, Tensor) or value.ndim < -dim or value.shape[dim] != cut.length:
        return value
    return share(value, dim, cut, padding)
