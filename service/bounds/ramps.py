"""A graph whose steps let gradients through: for attacks, which would see none of a floor or of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from service.bounds.graph import Graph, Node, Ref
from service.bounds.graph_module import ExecutableGraph
from service.bounds.operators import STEPPED


def has_steps(graph: Graph) -> bool:
    """Return whether the function may jump."""
    return any(node.operator in STEPPED for node in graph.nodes)


class RampedGraph(ExecutableGraph):
    """``(n, features)`` to ``(n, outputs)``: the function itself, with the gradients of one whose steps are ramps
    (straight-through, Bengio et al., 2013).
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self._shape = graph.input.shape
        self._deciding = [
            (_decided_by(node), STEPPED[node.operator]) for node in graph.nodes if node.operator in STEPPED
        ]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, *self._shape)).flatten(1)

    def deciding(self, x: Tensor) -> Tensor:
        """Return all values ``(n, entries)`` that steps are decided by."""
        values = self._deciding_values(x)
        return torch.cat([values[name].flatten(1) for name, _ in self._deciding], dim=1)

    def sides(self, x: Tensor) -> Tensor:
        """Return the sides of their steps ``(n, entries)`` that these values are on."""
        values = self._deciding_values(x)
        return torch.cat([operator.side(values[name]).to(x).flatten(1) for name, operator in self._deciding], dim=1)

    def _deciding_values(self, x: Tensor) -> dict[str, Tensor]:
        names = {name for name, _ in self._deciding}
        return {name: value for name, value in self.steps(x.reshape(-1, *self._shape)) if name in names}

    def _computed(self, node: Node, arguments: Mapping[str, Any]) -> Tensor:
        operator = STEPPED.get(node.operator)
        return super()._computed(node, arguments) if operator is None else operator.ramp(arguments)


def _decided_by(node: Node) -> str:
    value = node.arguments[STEPPED[node.operator].decided_by]
    assert isinstance(value, Ref)
    return value.name
