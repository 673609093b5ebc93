"""One rank's graph: shares of the constants, and collectives at both ends of each region."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from service.bounds.graph import BatchSize, Graph, Node, Ref, Repeated
from service.bounds.operators import OPERATORS
from service.bounds.operators.linear import Affine, AffineOperator
from service.bounds.operators.reshape import Reshape
from service.bounds.shard.cuts import Cut
from service.bounds.shard.regions import CONVOLUTION, Region, output_dim, regions, undivided
from service.parallel.mesh import Axis

LINEAR, ADD = "aten.linear.default", "aten.add.Tensor"
COPY, REDUCE = "trivet.copy_to_group.default", "trivet.reduce_from_group.default"


def shard(graph: Graph, axis: Axis, tell: Callable[[str], None] = lambda line: None) -> Graph:
    """This rank's graph of the same function, replicated at both ends; every rank has nodes of the same names.

    Widths that do not divide are filled up with zeros: neurons that are 0, which no layer reads. Constants are
    copies, so that the whole ones may be dropped. Layers that do not pair stay whole; ``tell`` gets a line for
    each operator that keeps layers from it.
    """
    if axis.size == 1:
        return graph
    found = regions(graph, axis.size)
    for line in _whole(list(undivided(graph, found, axis.size)), axis.size):
        tell(line)
    return Graph(tuple(_Divider(graph, axis, found).nodes()))


def _whole(stopped: Sequence[tuple[Node, Node]], ranks: int) -> Iterator[str]:
    """A line for each kind of operator that keeps layers whole."""
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
        """This rank's share of a constant whose dimension ``dim`` is divided; a copy."""
        start = self.axis.rank * cut.share
        own = whole.narrow(dim, min(start, cut.length), max(0, min(cut.share, cut.length - start)))
        shape = [cut.share if index == dim % whole.ndim else length for index, length in enumerate(whole.shape)]
        share = torch.full(shape, fill, dtype=whole.dtype, device=whole.device)
        share.narrow(dim, 0, own.shape[dim]).copy_(own)
        return share

    def _column(self, node: Node, copied: str) -> Node:
        cut = self.cuts[node.name]
        shape = cut.local(node.shape)
        if node.operator == CONVOLUTION:
            out = 1 if node.arguments["transposed"] else 0
            arguments = self._convolution(node, {"weight": out, "bias": 0}, cut)
            return replace(node, arguments={**arguments, "input": Ref(copied)}, shape=shape)
        whole = _affine(node)
        bias = None if whole.bias is None else self._own(whole.bias, 0, cut)
        arguments = {"input": Ref(copied), "weight": self._own(whole.weight, 0, cut), "bias": bias}
        return Node(node.name, LINEAR, arguments, shape, node.input_shapes, node.where)

    def _row(self, node: Node) -> Iterator[Node]:
        """The rank's summand, the sum, and the bias once."""
        name = node.inputs[0]
        cut = self.cuts[name]
        if node.operator == CONVOLUTION:
            bias = node.arguments["bias"]
            into = 0 if node.arguments["transposed"] else 1
            arguments = {**self._convolution(node, {"weight": into}, cut), "bias": None}
            part = replace(node, arguments=arguments)
        else:
            whole = _affine(node)
            bias = whole.bias
            weight = self._own(whole.weight, 1, cut)
            part = replace(node, operator=LINEAR, arguments={"input": Ref(name), "weight": weight, "bias": None})
        shapes = (cut.local(node.input_shapes[0]),)
        yield replace(part, name=f"{node.name}_part", input_shapes=shapes)
        total = node.name if bias is None else f"{node.name}_sum"
        yield self._collective(node, total, REDUCE, f"{node.name}_part", node.shape)
        if bias is not None:
            trailing = [1] * (len(node.shape) - output_dim(node) - 1)
            added = {"self": Ref(total), "other": bias.reshape(-1, *trailing), "alpha": 1}
            yield Node(node.name, ADD, added, node.shape, (node.shape,), node.where)

    def _convolution(self, node: Node, divided: Mapping[str, int], cut: Cut) -> dict[str, Any]:
        constants = {name: dim for name, dim in divided.items() if node.arguments[name] is not None}
        shares = {name: self._own(node.constant(name), dim, cut) for name, dim in constants.items()}
        return {**node.arguments, **shares}

    def _within(self, node: Node) -> Node:
        cut = self.cuts[node.name]
        shape = cut.local(node.shape)
        before = [self.cuts[name].local(whole) for name, whole in zip(node.inputs, node.input_shapes, strict=True)]
        arguments = dict(node.arguments)
        operator = OPERATORS[node.operator]
        if operator.elementwise:
            fill = 1.0 if node.operator == "aten.div.Tensor" else 0.0
            arguments = {name: self._operand(value, node, cut, fill) for name, value in arguments.items()}
        elif node.operator == CONVOLUTION:
            arguments = {**self._convolution(node, {"weight": 0, "bias": 0}, cut), "groups": cut.share}
        elif isinstance(operator, Reshape):
            sized = next((name for name in ("size", "shape") if name in arguments), None)
            arguments |= {} if sized is None else {sized: (BatchSize(), *shape)}
        return replace(node, arguments=arguments, shape=shape, input_shapes=tuple(before))

    def _operand(self, value: Any, node: Node, cut: Cut, fill: float) -> Any:
        """A constant operand's share, where it is as long as the value and not broadcast along the cut."""
        if isinstance(value, Repeated):
            return Repeated(self._operand(value.value, node, cut, fill))
        dim = cut.dim - len(node.shape)
        if not isinstance(value, Tensor) or value.ndim < -dim or value.shape[dim] != cut.length:
            return value
        return self._own(value, dim, cut, fill)


def _affine(node: Node) -> Affine:
    operator = OPERATORS[node.operator]
    assert isinstance(operator, AffineOperator)
    return operator.read(node)
