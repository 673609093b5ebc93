"""One rank's graph: shares of the constants, and collectives at both ends of each region."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from service.bounds.graph import Graph, Node, Ref
from service.bounds.operators import OPERATORS
from service.bounds.operators.sharding import Cut, Layer
from service.bounds.shard.regions import Region, layer_of, regions, undivided
from service.parallel.mesh import Axis

ADD = "aten.add.Tensor"
COPY, REDUCE = "trivet.copy_to_group.default", "trivet.reduce_from_group.default"


def shard(graph: Graph, axis: Axis, tell: Callable[[str], None] = lambda line: None) -> Graph:
    """Return this rank's graph of the same function, replicated at both ends; every rank has nodes of the same names.

    Widths that do not divide are filled up with zeros: neurons that are 0, which no layer reads. Constants are
    copies, so that the whole ones may be dropped. Layers that do not pair stay whole; ``tell`` gets a line for
    each operator that prevents a pair.
    """
    if axis.size == 1:
        return graph
    found = regions(graph, axis.size)
    for line in _whole(list(undivided(graph, found, axis.size)), axis.size):
        tell(line)
    return Graph(tuple(_Divider(graph, axis, found).nodes()))


def _whole(stopped: Sequence[tuple[Node, Node]], ranks: int) -> Iterator[str]:
    """Return a line for each kind of operator that keeps layers whole."""
    for kind in dict.fromkeys(at.operator for _, at in stopped):
        layer, at = next(each for each in stopped if each[1].operator == kind)
        count = sum(at.operator == kind for _, at in stopped)
        more = f" and {count - 1} more layers stay" if count > 1 else " stays"
        yield f"{layer}{more} whole on each of {ranks} tensor-parallel ranks: {at} cannot be divided over them"


class _Divider:
    def __init__(self, graph: Graph, axis: Axis, found: Sequence[Region]) -> None:
        self.graph, self.axis = graph, axis
        self.columns: dict[str, int] = {name: index for index, region in enumerate(found) for name in region.columns}
        self.rows: dict[str, Region] = {name: region for region in found for name in region.rows}
        self.cuts: dict[str, Cut] = {name: cut for region in found for name, cut in region.cuts.items()}

    def nodes(self) -> Iterator[Node]:
        entered: set[str] = set()
        for node in self.graph.nodes:
            if node.name in self.columns:
                copied = f"{node.inputs[0]}_copied_{self.columns[node.name]}"
                if copied not in entered:
                    entered.add(copied)
                    yield self._collective(node, copied, COPY, node.inputs[0], node.input_shapes[0])
                yield self._column(node, copied)
            elif node.name in self.rows:
                yield from self._row(node)
            elif node.name in self.cuts:
                yield self._within(node)
            else:
                yield node

    def _collective(self, node: Node, name: str, operator: str, of: str, shape: tuple[int, ...]) -> Node:
        return Node(name, operator, {"x": Ref(of), "group": self.axis.group}, shape, (shape,), node.where)

    def _own(self, whole: Tensor, dim: int, cut: Cut, fill: float = 0.0) -> Tensor:
        """Return this rank's share of a constant whose dimension ``dim`` is divided; a copy."""
        start = self.axis.rank * cut.share
        own = whole.narrow(dim, min(start, cut.length), max(0, min(cut.share, cut.length - start)))
        shape = [cut.share if index == dim % whole.ndim else length for index, length in enumerate(whole.shape)]
        share = torch.full(shape, fill, dtype=whole.dtype, device=whole.device)
        share.narrow(dim, 0, own.shape[dim]).copy_(own)
        return share

    def _column(self, node: Node, copied: str) -> Node:
        cut, layer = self.cuts[node.name], self._layer(node)
        bias = None if layer.bias is None else self._own(layer.bias, 0, cut)
        weight = self._own(layer.weight, layer.weight_out, cut)
        arguments = {**layer.arguments, "input": Ref(copied), "weight": weight, "bias": bias}
        return replace(node, operator=layer.overload, arguments=arguments, shape=cut.local(node.shape))

    def _row(self, node: Node) -> Iterator[Node]:
        """Return the rank's summand, the sum, and the bias once."""
        name = node.inputs[0]
        cut, layer = self.cuts[name], self._layer(node)
        weight = self._own(layer.weight, layer.weight_in, cut)
        arguments = {**layer.arguments, "input": Ref(name), "weight": weight, "bias": None}
        shapes = (cut.local(node.input_shapes[0]),)
        yield Node(f"{node.name}_part", layer.overload, arguments, node.shape, shapes, node.where)
        total = node.name if layer.bias is None else f"{node.name}_sum"
        yield self._collective(node, total, REDUCE, f"{node.name}_part", node.shape)
        if layer.bias is not None:
            trailing = [1] * (len(node.shape) - layer.output_dim - 1)
            added = {"self": Ref(total), "other": layer.bias.reshape(-1, *trailing), "alpha": 1}
            yield Node(node.name, ADD, added, node.shape, (node.shape,), node.where)

    @staticmethod
    def _layer(node: Node) -> Layer:
        layer = layer_of(node)
        assert layer is not None
        return layer

    def _within(self, node: Node) -> Node:
        cut = self.cuts[node.name]
        before = [self.cuts[name].local(whole) for name, whole in zip(node.inputs, node.input_shapes, strict=True)]
        arguments = OPERATORS[node.operator].local_arguments(node, cut, self._own)
        return replace(node, arguments=arguments, shape=cut.local(node.shape), input_shapes=tuple(before))
