"""Captures the graphs of a module as Dynamo does, and finds the smallest part of one that still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.nn import Parameter

from service.compilation.instruments.caches import empty_caches
from service.compilation.program import Program
from service.compilation.run.built_program import build_only, record_step
from service.compilation.run.observation import RungCase
from service.compilation.rungs import Rung
from service.torch_internals.types import OpOverload

_FAR = ("trivet", "_c10d_functional", "c10d", "fsdp")
"""Operators of these namespaces need a process group."""


class UnsuitableError(Exception):
    """A graph cannot be run outside its program; the message says why."""


@dataclass(frozen=True)
class Captured:
    """A graph and the plain tensors and numbers with which it was called."""

    graph: fx.GraphModule
    inputs: tuple[Any, ...]

    @property
    def operators(self) -> int:
        return len(_body(self.graph))


_Fails = Callable[[Captured], bool]


def capture(program: Program, case: RungCase, unit: str) -> list[Captured]:
    """Return the graphs of ``unit`` in the program's first step, in the order in which they ran."""
    found: list[Captured] = []

    def backend(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            if all(each.graph is not graph for each in found):
                found.append(Captured(graph, tuple(map(_copy_value, inputs))))
            return graph.forward(*inputs)

        return run

    with empty_caches():
        built = build_only(program, case.phase, Rung("capture", backend), unit)
        record_step(built, 0)
    for each in found:
        check_alone(each)
    return found


def check_alone(captured: Captured) -> None:
    """Raise :class:`UnsuitableError` unless the graph runs with its inputs alone."""
    for value in captured.inputs:
        if isinstance(value, Tensor) and type(value) not in (Tensor, Parameter):
            raise UnsuitableError(f"its graph takes a {type(value).__name__}")
    for node in _body(captured.graph):
        if node.op in ("get_attr", "call_module"):
            raise UnsuitableError(f"its graph holds {node.target}, which is no operator")
        if isinstance(node.target, OpOverload) and node.target.namespace in _FAR:
            raise UnsuitableError(f"its graph holds {node.target}, which needs the program's group")


def minimise(captured: Captured, fails: _Fails, deadline: float) -> Captured:
    """Return the smallest run of operators that ``fails`` like the whole, found by two bisections.

    Values computed before that run become its inputs. At ``deadline`` (of ``time.monotonic``) the smallest so far is
    returned.
    """
    values = _Values(captured.graph)
    values.run(*captured.inputs)
    body = _body(captured.graph)

    def part(first: int, last: int) -> Captured | None:
        return _part(captured.graph, values.seen, body[first : last + 1])

    def bad(first: int, last: int) -> bool:
        found = part(first, last)
        return time.monotonic() < deadline and found is not None and fails(found)

    last = _bisect(0, len(body) - 1, lambda index: bad(0, index))
    first = -_bisect(-last, 0, lambda index: bad(-index, last))
    smallest = part(first, last)
    return smallest if smallest is not None and bad(first, last) else captured


def _bisect(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the least index for which ``holds``, given that it holds for ``high`` and then stays so."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return high


class _Values(fx.Interpreter):
    """Runs a graph and keeps the result of each node."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.seen: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.seen[n] = _copy_value(value)
        return value


def _part(whole: fx.GraphModule, values: dict[fx.Node, Any], nodes: Sequence[fx.Node]) -> Captured | None:
    """Return ``nodes`` as a graph of its own; ``None`` if none of its results can be compared."""
    graph, made, inputs = fx.Graph(), dict[fx.Node, fx.Node](), list[Any]()
    for node in nodes:
        for needed in node.all_input_nodes:
            if needed not in made:
                made[needed] = graph.placeholder(f"given_{len(inputs)}")
                inputs.append(values[needed])
        made[node] = graph.node_copy(node, lambda each: made[each])
    inside = set(nodes)
    ends = [node for node in nodes if isinstance(values[node], Tensor) and not inside & set(node.users)]
    if not ends or not all(isinstance(value, Tensor | int | float | bool) for value in inputs):
        return None
    graph.output(tuple(made[node] for node in ends))
    return Captured(fx.GraphModule(whole, graph), tuple(inputs))


def _body(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]


def _copy_value(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
