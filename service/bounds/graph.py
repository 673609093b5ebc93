"""Represents the network as plain data: typed nodes over one batched input.

Shapes are those of one instance, without the batch dimension. Every value that depends on the input has the batch
first, so that instances never mix; other values are constants. Operations are marked by their names in the model's
file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node as FxNode
from torch.fx.traceback import annotate

from service.jobs.runtime import RefusedError

INPUT = "input"
PRODUCT = "trivet.product"
"""Arguments ``self`` and ``other``, both dependent on the input: their entrywise product."""
FLOOR_OF_SIGNED = "trivet.floor_of_signed"
"""The greatest whole number not above ``self``, whose lower end is an exact 0 if it is 0."""
MAXIMUM = "trivet.maximum"
"""The larger of ``self`` and ``other``, with their ``difference``, which decides, as a separate value."""
CHOICE = "trivet.choice"
"""``self`` where ``condition``, a value, is above 0, and ``other`` elsewhere."""
IS_NAN = "trivet.is_nan"
IS_POSITIVE_INFINITY, IS_NEGATIVE_INFINITY = "trivet.is_infinity", "trivet.is_minus_infinity"
TESTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    IS_NAN: torch.isnan,
    IS_POSITIVE_INFINITY: torch.isposinf,
    IS_NEGATIVE_INFINITY: torch.isneginf,
}
"""Tests of ``self`` by their functions: a value of 0.5 for yes and of -0.5 for no, by whose sign a choice decides."""
COMPARABLE = {torch.float32: 2.0**125, torch.float64: 2.0**960}
"""A size of values by their type: constants are compared as if they were no larger, so that differences are finite."""
MATRIX_OF_TWO = "trivet.matrix_product"
"""The matrix product of two values."""
MATRIX_FROM_LEFT = "trivet.matrix_from_left"
"""The matrix product of a constant ``self`` and a value ``other``."""


class UnsupportedModelError(RefusedError, ValueError):
    """The model has a node that cannot be bounded; the message names it."""


@dataclass(frozen=True)
class Ref:
    """A value that depends on the input, by the name of its node."""

    name: str


@dataclass(frozen=True)
class BatchSize:
    """Stands for a size that depends on the batch, as an argument of an operator."""


@dataclass(frozen=True, eq=False)
class Repeated:
    """A constant that every instance has: ``value`` with a batch of 1, expanded to the batch where it is used."""

    value: Tensor


@dataclass(frozen=True, eq=False)
class Node:
    """One application of an operator.

    ``operator`` is its overload's name (``aten.linear.default``), :data:`INPUT` for the input itself. ``arguments``
    follow the operator's schema, by name: a :class:`Ref`, a constant tensor or a plain value. ``input_shapes`` are
    those of ``inputs``, in the same order. ``where`` is the place in the model's source, ``source`` the operator's name
    in the file that the model was read from.
    """

    name: str
    operator: str
    arguments: Mapping[str, Any]
    shape: tuple[int, ...]
    input_shapes: tuple[tuple[int, ...], ...] = ()
    where: str = ""
    source: str = ""

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the values it is computed from, in the schema's order."""
        return tuple(ref.name for value in self.arguments.values() for ref in refs(value))

    @cached_property
    def size(self) -> int:
        """Return the number of entries of the output for one instance."""
        return prod(self.shape)

    def is_variable(self, argument: str) -> bool:
        return isinstance(self.arguments.get(argument), Ref)

    def constant(self, argument: str) -> Tensor:
        value = self.arguments[argument]
        if not isinstance(value, Tensor):
            raise TypeError(f"{self}: argument {argument!r} is {type(value).__name__}, expected a constant tensor")
        return value

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"{self.operator} (node {self.name!r}{place})"


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes in execution order; the first is the input, the last the output, and every one reaches the output."""

    nodes: tuple[Node, ...]

    @property
    def input(self) -> Node:
        return self.nodes[0]

    @property
    def output(self) -> Node:
        return self.nodes[-1]

    @property
    def by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Graph:
        """Return the graph with its constants on a device, floating-point ones in ``dtype`` where it is given."""
        return Graph(
            tuple(
                replace(node, arguments={name: _move(value, device, dtype) for name, value in node.arguments.items()})
                for node in self.nodes
            )
        )

    def until(self, name: str) -> tuple[Node, ...]:
        """Return the nodes up to and including ``name``."""
        names = [node.name for node in self.nodes]
        return self.nodes[: names.index(name) + 1]


def _move(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(value, tuple):
        return tuple(_move(item, device, dtype) for item in value)
    if isinstance(value, Repeated):
        return Repeated(_move(value.value, device, dtype))
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype if dtype is not None and value.is_floating_point() else value.dtype)


def refs(value: Any) -> tuple[Ref, ...]:
    """Return the references in an argument."""
    if isinstance(value, Ref):
        return (value,)
    if isinstance(value, tuple):
        return tuple(ref for item in value for ref in refs(item))
    return ()


_KEY = "trivet_source"


def annotated(name: str) -> AbstractContextManager[object]:
    """Return a context whose traced operations belong to the operation ``name``."""
    return annotate({_KEY: name})


def source_of(fx: FxNode) -> str:
    """Return the name that a traced operation was marked with; empty without one."""
    return str((fx.meta.get("custom") or {}).get(_KEY, ""))
