"""Planes below rows of the output, for batches of boxes: over a folded network where it is small, else by a method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from service.bounds.folded import Folded, fold
from service.bounds.interval import Interval
from service.bounds.methods import METHODS, Effort, Method
from service.bounds.methods.base import LinearAnalysis
from service.bounds.network import Network
from service.bounds.planes import Known, Planes, Walk, minimum


class Bounder(Protocol):
    """``box`` is ``(batch, features)``, ``rows`` ``(rows, outputs)``; ``known`` holds in the boxes."""

    @property
    def entries(self) -> int:
        """A measure of the memory that one box takes."""

    def planes(self, box: Interval, known: Known, rows: Tensor) -> Planes: ...


def bounder(network: Network, method: str, like: Tensor) -> Bounder:
    """In the dtype and on the device of ``like``.

    The folded network's planes are those of ``crown``; weaker methods are done as they are.
    """
    folded = None if method in ("ibp", "crown-ibp") else fold(network, like)
    return ByMethod(network, METHODS[method]) if folded is None else ByFolding(folded)


@dataclass(frozen=True, eq=False)
class ByFolding:
    folded: Folded

    @property
    def entries(self) -> int:
        """Pairs of rows for a third of the entries, each as wide as the widest operator."""
        sizes = [operator.node.size for operator in self.folded.operators]
        return max(1, sum(sizes) * max(sizes, default=1))

    def planes(self, box: Interval, known: Known, rows: Tensor) -> Planes:
        return Walk(self.folded, box, known).planes(rows)


@dataclass(frozen=True, eq=False)
class ByMethod:
    """What is known of the values in a larger box is not used."""

    network: Network
    method: Method

    @property
    def entries(self) -> int:
        sizes = [node.size for node in self.network.graph.nodes]
        return max(sizes) * 64

    def planes(self, box: Interval, known: Known, rows: Tensor) -> Planes:
        graph = self.network.graph
        shaped = box.map(lambda end: end.reshape(-1, *graph.input.shape))
        analysis = self.method(self.network, shaped, Effort())
        assert isinstance(analysis, LinearAnalysis)
        # The least value over a box is linear in the box's centre: its slope is the plane's.
        with torch.enable_grad():
            ends = shaped.map(lambda end: end.detach().requires_grad_())
            intervals = {**analysis.backward.intervals, graph.input.name: ends}
            backward = replace(analysis, backward=replace(analysis.backward, intervals=intervals))
            least = backward.lower_bounds(rows.reshape(1, -1, *graph.output.shape))
            slopes = [_slope(each, ends) for each in least.unbind(dim=1)]
        coefficients = torch.stack(slopes, dim=1).flatten(2)
        least = least.detach()
        bias = least - minimum(box, coefficients, torch.zeros_like(least))
        return Planes(coefficients, bias, {}, torch.zeros_like(box.lower))


def _slope(least: Tensor, ends: Interval) -> Tensor:
    lower, upper = torch.autograd.grad(
        least.sum(), (ends.lower, ends.upper), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return lower + upper
