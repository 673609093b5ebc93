"""Branches whose condition is a constant: the one that is taken, in the place of its ``If``.

Exporters write them where a shape decides, as for ``squeeze``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx
from onnx import helper

from service.bounds.operators.onnx import Array
from service.formats.onnx import constant_conditions
from service.formats.onnx_checks import name_of
from service.formats.onnx_dependence import graphs_in, names_in

Evaluate = Callable[[onnx.ModelProto, set[str]], Mapping[str, Array]]


def with_branches_taken(model: onnx.ModelProto, evaluate: Evaluate) -> onnx.ModelProto:
    """Return the model without any ``If`` that does not ask the input; ``evaluate`` gives values of constants."""
    while chosen := constant_conditions(model):
        values = evaluate(model, {node.input[0] for node in chosen.values()})
        taken = onnx.ModelProto()
        taken.CopyFrom(model)
        taken.graph.ClearField("node")
        for index, node in enumerate(model.graph.node):
            if index in chosen:
                _put(taken.graph, node, index, bool(values[node.input[0]].all()))
            else:
                taken.graph.node.append(node)
        model = taken
    return model


def _put(graph: onnx.GraphProto, node: onnx.NodeProto, index: int, condition: bool) -> None:
    """Add the branch that is taken, its values under names that nothing else has."""
    wanted = "then_branch" if condition else "else_branch"
    branch = next(each.g for each in node.attribute if each.name == wanted)
    place = f"{name_of(node, index)}.{index}.{wanted}"
    names = {name: f"{place}.{name}" for name in names_in(branch)}
    for tensor in branch.initializer:
        graph.initializer.add().CopyFrom(tensor)
        graph.initializer[-1].name = names[tensor.name]
    for sparse in branch.sparse_initializer:
        graph.sparse_initializer.add().CopyFrom(sparse)
        graph.sparse_initializer[-1].values.name = names[sparse.values.name]
    for inner in branch.node:
        graph.node.add().CopyFrom(inner)
        _rename(graph.node[-1], names)
    for given, output in zip(branch.output, node.output, strict=True):
        if output:
            graph.node.append(helper.make_node("Identity", [names.get(given.name, given.name)], [output]))


def _rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    for field in (node.input, node.output):
        for position, name in enumerate(field):
            field[position] = names.get(name, name)
    for graph in graphs_in(node):
        own = names_in(graph)
        outer = {name: new for name, new in names.items() if name not in own}
        for inner in graph.node:
            _rename(inner, outer)
        for output in graph.output:
            output.name = outer.get(output.name, output.name)
