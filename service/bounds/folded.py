"""Folds everything linear between a small network's non-linear operators into matrices.

The result is a list of operators whose inputs are affine forms in the network's input and in earlier operators'
outputs. A backward pass is then one matrix product and one relaxation for each, which suits many small boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from service.bounds.flat import by_row
from service.bounds.graph import Node
from service.bounds.linear.propagation import traverse_backward
from service.bounds.linear.sharding import dense
from service.bounds.network import Network
from service.bounds.operators import LINEAR

LARGEST = 2**22
"""Most entries of all matrices together of a small network."""


@dataclass(frozen=True, eq=False)
class FoldedForm:
    """``Σ matrices[source] · source + bias`` over flattened values; matrices are ``(entries, entries of source)``."""

    matrices: Mapping[str, Tensor]
    bias: Tensor

    def rows(self, rows: Tensor) -> FoldedForm:
        """Return ``rows`` ``(n, entries)`` times the form."""
        return FoldedForm({name: rows @ matrix for name, matrix in self.matrices.items()}, rows @ self.bias)


@dataclass(frozen=True, eq=False)
class FoldedNetwork:
    """The non-linear ``nodes`` in execution order; ``forms`` of the values that they read, by name; ``output`` is the
    network's.
    """

    network: Network
    nodes: tuple[Node, ...]
    forms: Mapping[str, FoldedForm]
    output: FoldedForm

    @property
    def input(self) -> str:
        return self.network.graph.input.name


def fold(network: Network, like: Tensor) -> FoldedNetwork | None:
    """Fold a network, in the dtype and on the device of ``like``.

    Return ``None`` if the matrices would be large, or the network is divided over ranks.
    """
    if network.tp_group.axis.size > 1:
        return None
    nodes = network.nonlinear
    wanted = dict.fromkeys((*(name for node in nodes for name in node.inputs), network.graph.output.name))
    sources = {network.graph.input.name, *(node.name for node in nodes)}
    widest = max(network.nodes[name].size for name in sources)
    if sum(network.nodes[name].size for name in wanted) * widest > LARGEST:
        return None
    forms = {name: _form(network, name, sources, like) for name in wanted}
    return FoldedNetwork(network, nodes, forms, forms[network.graph.output.name])


def _form(network: Network, name: str, sources: set[str], like: Tensor) -> FoldedForm:
    """Return a value as an affine form: the identity, propagated back until every coefficient lies on a source."""
    start = network.nodes[name]
    identity = torch.eye(start.size, dtype=like.dtype, device=like.device).reshape(1, start.size, *start.shape)
    matrices: dict[str, Tensor] = {}
    biases = [torch.zeros(start.size, dtype=like.dtype, device=like.device)]

    def propagate(node: Node, coefficients: Tensor) -> Iterable[tuple[str, Tensor]]:
        if node.name in sources:
            matrices[node.name] = by_row(coefficients)[0].contiguous()
            return ()
        step = LINEAR[node.operator].backward(node, coefficients, network.tp_group)
        if step.bias is not None:
            biases.append(step.bias[0])
        pairs = zip(node.inputs, step.coefficients, strict=True)
        return [(source, dense(network.nodes[source], rows, like)) for source, rows in pairs]

    nodes = network.graph.nodes[network.position[name] :: -1]
    traverse_backward(nodes, {name: identity}, propagate, lambda _, earlier, new: earlier + new)
    return FoldedForm(matrices, sum(biases[1:], start=biases[0]))
