"""The product of a softmax, ``x_i · (1 / Σ_j x_j)``, whose entries add up to one: what is known beside the bounds of
its parts, an exponential, a sum, a reciprocal and a product, each in a file of its own.

A row of coefficients c over such entries equals the row c − m plus m, for any number m. The loss of relaxations
grows with the size of the coefficients that pass through them, so m is chosen to leave little: the median of c,
each entry weighted by its width, which minimises Σ w_i·|c_i − m|.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from service.bounds.flat import by_row
from service.bounds.graph import Node
from service.bounds.interval import Interval
from service.bounds.operators.mul import Product
from service.bounds.relaxation import Changed, Family, Relaxed


@dataclass(frozen=True, eq=False)
class SoftmaxProduct(Product):
    """A product whose entries add up to one along ``axes``; the plain bounds know it, the rigorous ones do not."""

    overloads = ()
    axes: tuple[int, ...]

    def centred(self, coefficients: Tensor, bounds: Sequence[Interval]) -> Tensor:
        return coefficients - self.middle(coefficients, self.widths(bounds))

    def relax_on(self, node: Node, bounds: Sequence[Interval]) -> Relaxed:
        return _Centred(super().relax_on(node, bounds), self, self.widths(bounds))

    def family(self, node: Node, bounds: Sequence[Interval]) -> Family:
        centred = partial(_Centred, operator=self, widths=self.widths(bounds))
        return Changed(super().family(node, bounds), centred)

    @staticmethod
    def widths(bounds: Sequence[Interval]) -> Tensor:
        """Return about how wide each entry is, ``(batch, *shape)``; it only steers the choice of m."""
        x, y = bounds
        ends = torch.stack([x.lower * y.lower, x.lower * y.upper, x.upper * y.lower, x.upper * y.upper]).detach()
        return (ends.amax(dim=0) - ends.amin(dim=0)).nan_to_num(nan=0.0, posinf=1.0)

    def middle(self, coefficients: Tensor, widths: Tensor) -> Tensor:
        """Return the weighted median of ``(b, rows, *shape)`` along the axes, which keep a length of 1."""
        batch, count = max(len(coefficients), len(widths)), coefficients.shape[1]
        coefficients = coefficients.expand(batch, *coefficients.shape[1:])
        weights = widths.unsqueeze(1).expand(batch, count, *widths.shape[1:])
        axes = [axis + 2 for axis in self.axes]
        last = list(range(-len(axes), 0))
        rows, weights = (each.movedim(axes, last).flatten(-len(axes)) for each in (coefficients, weights))
        ascending, order = rows.sort(dim=-1)
        below = weights.gather(-1, order).cumsum(dim=-1)
        place = (below < below[..., -1:] / 2).sum(dim=-1, keepdim=True).clamp(max=rows.shape[-1] - 1)
        found = ascending.gather(-1, place)
        return found.reshape(*found.shape[:-1], *(1 for _ in axes)).movedim(last, axes)


@dataclass(frozen=True, eq=False)
class _Centred(Relaxed):
    relaxed: Relaxed
    operator: SoftmaxProduct
    widths: Tensor

    def backward(self, coefficients: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        middle = self.operator.middle(coefficients, self.widths)
        propagated, bias = self.relaxed.backward(coefficients - middle)
        constant = by_row(middle).sum(dim=2)
        return propagated, constant if bias is None else bias + constant
