"""Runs a graph as a module, for use when the traced module is not available or not in one piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from service.bounds.graph import (
    CHOICE,
    FLOOR_OF_SIGNED,
    MATRIX_FROM_LEFT,
    MATRIX_OF_TWO,
    MAXIMUM,
    PRODUCT,
    TESTS,
    BatchSize,
    Graph,
    Node,
    Ref,
    Repeated,
)


def _tested(function: Callable[[Tensor], Tensor], **arguments: Tensor) -> Tensor:
    """Return half of 1 where the one argument passes a test, and else less half of 1."""
    (x,) = arguments.values()
    return function(x).to(x.dtype) - 0.5


_OWN: Mapping[str, Callable[..., Tensor]] = {
    FLOOR_OF_SIGNED: torch.ops.aten.floor.default,
    CHOICE: lambda condition, **operands: torch.ops.aten.where.self(condition > 0, **operands),
    PRODUCT: torch.ops.aten.mul.Tensor,
    MAXIMUM: lambda difference, **operands: torch.ops.aten.maximum.default(**operands),
    MATRIX_OF_TWO: torch.ops.aten.matmul.default,
    MATRIX_FROM_LEFT: torch.ops.aten.matmul.default,
    **{name: partial(_tested, function) for name, function in TESTS.items()},
}


class ExecutableGraph(nn.Module):
    """``(batch, *shape of the input)`` to ``(batch, *shape of the output)``, differentiable, in the type of its
    constants, which are buffers.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._count = 0
        self._nodes = [
            replace(node, arguments={name: self._held(value) for name, value in node.arguments.items()})
            for node in graph.nodes
        ]

    def forward(self, x: Tensor) -> Tensor:
        return deque(self.steps(x), maxlen=1)[0][1]

    def steps(self, x: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the value of each node, by its name, in order of execution."""
        values = {self._nodes[0].name: x}
        left = self._uses()
        yield self._nodes[0].name, x
        for node in self._nodes[1:]:
            arguments = {name: self._put_in(value, values, x) for name, value in node.arguments.items()}
            values[node.name] = self._computed(node, arguments)
            for name in left[node.name]:
                del values[name]
            yield node.name, values[node.name]

    def _computed(self, node: Node, arguments: Mapping[str, Any]) -> Tensor:
        """Return the value of a node from its arguments, by name."""
        found: Tensor = function_of(node)(**arguments)
        return found

    def _uses(self) -> dict[str, list[str]]:
        """Return, by node, the values that nothing uses after it."""
        last = {name: node.name for node in self._nodes for name in node.inputs}
        done: dict[str, list[str]] = {node.name: [] for node in self._nodes}
        for name, node in last.items():
            done[node].append(name)
        return done

    def _held(self, value: Any) -> Any:
        """Register constants as buffers, under names that stand for them."""
        if isinstance(value, Repeated):
            return Repeated(self._held(value.value))
        if isinstance(value, tuple):
            return tuple(self._held(each) for each in value)
        if not isinstance(value, Tensor):
            return value
        name, self._count = f"constant_{self._count}", self._count + 1
        self.register_buffer(name, value)
        return _Held(name)

    def _put_in(self, value: Any, values: Mapping[str, Tensor], x: Tensor) -> Any:
        match value:
            case Ref():
                found: Any = values[value.name]
            case BatchSize():
                found = len(x)
            case _Held():
                found = self.get_buffer(value.name)
            case Repeated():
                once = self._put_in(value.value, values, x)
                found = once.expand(len(x), *once.shape[1:])
            case tuple():
                found = [self._put_in(each, values, x) for each in value]
            # The traced type and device are now those of the constants, which may have moved.
            case torch.dtype():
                found = x.dtype if value.is_floating_point else value
            case torch.device():
                found = x.device
            case _:
                found = value
        return found


class _Held:
    def __init__(self, name: str) -> None:
        self.name = name


def function_of(node: Node) -> Callable[..., Any]:
    """Return the function of its arguments, by name."""
    if node.operator in _OWN:
        return _OWN[node.operator]
    namespace, name, overload = node.operator.split(".")
    operator: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return operator
