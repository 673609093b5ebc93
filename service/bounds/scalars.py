"""Values of one number for each instance, as vectors of one entry: operators count entries along a dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from service.bounds.graph import BatchSize, Node, Ref, Repeated

_SHAPED = frozenset({"dim", "dims", "size", "shape"})
"""Arguments of what gives a value its shape, which is no function of entries."""


def as_vectors(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes with functions of such numbers between two views; each value keeps its name and its shape."""
    found, vectors = list[Node](), dict[str, str]()
    for node in nodes:
        if not _is_of_numbers(node):
            found.append(node)
            continue
        for name in node.inputs:
            if name not in vectors:
                vectors[name] = f"{name}_entry"
                found.append(_view(vectors[name], name, node, (1,)))
        vectors[node.name] = f"{node.name}_entry"
        arguments = {name: _of_vectors(value, vectors) for name, value in node.arguments.items()}
        shapes = ((1,),) * len(node.inputs)
        found.append(replace(node, name=vectors[node.name], arguments=arguments, shape=(1,), input_shapes=shapes))
        found.append(_view(node.name, vectors[node.name], node, ()))
    return found


def _is_of_numbers(node: Node) -> bool:
    are_numbers = bool(node.inputs) and not any((node.shape, *node.input_shapes))
    return are_numbers and not _SHAPED & node.arguments.keys()


def _view(name: str, of: str, node: Node, shape: tuple[int, ...]) -> Node:
    size = (BatchSize(), *shape)
    before = () if shape else (1,)
    return Node(name, "aten.view.default", {"self": Ref(of), "size": size}, shape, (before,), node.where)


def _of_vectors(value: Any, vectors: Mapping[str, str]) -> Any:
    if isinstance(value, Ref):
        return Ref(vectors[value.name])
    if isinstance(value, tuple):
        return tuple(_of_vectors(each, vectors) for each in value)
    if isinstance(value, Repeated) and value.value.dim() == 1:
        return Repeated(value.value.unsqueeze(1))
    return value
