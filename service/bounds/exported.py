"""Turns an exported program into a :class:`Graph`: folds constants, and types every node that depends on the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isinf
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node as FxNode

from service.bounds.graph import (
    CHOICE,
    COMPARABLE,
    FLOOR_OF_SIGNED,
    INPUT,
    IS_NAN,
    IS_NEGATIVE_INFINITY,
    IS_POSITIVE_INFINITY,
    MATRIX_FROM_LEFT,
    MATRIX_OF_TWO,
    MAXIMUM,
    PRODUCT,
    BatchSize,
    Graph,
    Node,
    Ref,
    Repeated,
    UnsupportedModelError,
    refs,
    source_of,
)
from service.bounds.whole_functions import written_whole
from service.formats.exported import source_line
from service.torch_internals.table import internal_of
from service.torch_internals.types import SCHEMA, OpOverload

RECIPROCAL, POWER = "aten.reciprocal.default", "aten.pow.Tensor_Scalar"
BATCHED, SELECTED = "aten.bmm.default", "aten.index_select.default"
ABOVE, CHOOSING = "aten.gt.Scalar", "aten.where.self"
_OF_TWO = {"aten.mul.Tensor": PRODUCT, "aten.div.Tensor": PRODUCT, "aten.matmul.default": MATRIX_OF_TWO}
ALL_REDUCE = "_c10d_functional.all_reduce.default"
_RESULTS = {"aten.copy.default": "src", "_c10d_functional.wait_tensor.default": "tensor"}
"""Operators whose result is one of their arguments."""
REPEATING = {"aten.expand.default", "aten.full.default"}
MOVING = {"aten.permute.default", "aten.select.int", "aten.slice.Tensor", "aten.index_select.default"}
MOVING |= {"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.unsqueeze.default"}
"""Operators that only move entries."""
VIEWS = {"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"}
"""Operators that change nothing if the shape stays the same."""
_SHAPED = frozenset({"dim", "dims", "size", "shape"})
"""Arguments of operators that give a value its shape, not functions of entries."""


@dataclass(frozen=True)
class _Unusable:
    """The result of a call that is neither a tensor nor a size: an error only if something uses it."""

    fx: FxNode


@dataclass(frozen=True)
class _Positive:
    """Whether a value is above 0; only a choice may use it."""

    value: Ref


def _as_vectors(nodes: Sequence[Node]) -> list[Node]:
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


class GraphBuilder:
    """Build the graph of an exported program: constants are folded, and nodes that depend on the input are typed."""

    def __init__(self, program: ExportedProgram, state: Mapping[str, Tensor]) -> None:
        self.program = program
        self.values: dict[str, Any] = {}
        self.state = list(state.values())
        self.nodes: list[Node] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtype: torch.dtype = torch.float32
        self.batch: Any = None

    def build(self) -> Graph:
        self._read_placeholders()
        output: Ref | None = None
        for fx in self.program.graph.nodes:
            if fx.op == "call_function":
                self.values[fx.name] = self._read_call(fx)
            elif fx.op == "output":
                output = self._read_output(fx)
        if output is None:
            raise UnsupportedModelError("the traced program has no output")
        return Graph(_reaching(_as_vectors(written_whole(self.nodes, self.dtype)), output.name))

    def _read_placeholders(self) -> None:
        lifted = self.program.constants
        owners = self.program.graph_signature.inputs_to_lifted_tensor_constants
        user = [fx for fx in self.program.graph.nodes if fx.op == "placeholder" and fx.name not in owners]
        for fx in self.program.graph.nodes:
            if fx.op == "placeholder" and fx.name in owners:
                self.values[fx.name] = lifted[owners[fx.name]]
        for fx, tensor in zip(user[1:], self.state, strict=True):
            self.values[fx.name] = tensor
        meta = user[0].meta["val"]
        self.batch = meta.shape[0]
        self.dtype = meta.dtype
        self._add(Node(user[0].name, INPUT, {}, tuple(int(length) for length in meta.shape[1:])))
        self.values[user[0].name] = Ref(user[0].name)

    def _read_call(self, fx: FxNode) -> Any:
        value = fx.meta.get("val")
        if isinstance(value, torch.SymInt):
            return BatchSize()
        if not isinstance(fx.target, OpOverload) or value is None:
            return _Unusable(fx)
        target = fx.target
        arguments = self._bind(fx, target)
        if str(target) in REPEATING and isinstance(value, Tensor) and not any(map(refs, arguments.values())):
            repeated = self._repeated(target, arguments, value)
            if repeated is not None:
                return repeated
        if not any(_depends(value) for value in arguments.values()):
            return self._fold(fx, target)
        if not isinstance(value, Tensor):
            return _Unusable(fx)
        return self._read_tensor(fx, str(target), arguments, value)

    def _read_tensor(
        self, fx: FxNode, operator: str, arguments: dict[str, Any], value: Tensor
    ) -> Ref | _Positive | Repeated:
        """Return a call whose result depends on the input."""
        if operator == ABOVE and isinstance(arguments["self"], Ref) and arguments["other"] == 0:
            return _Positive(arguments["self"])
        if (test := _test(operator, arguments)) is not None:
            asked = arguments["self"]
            shape = self.shapes[asked.name]
            self._add(Node(fx.name, test, {"self": asked}, shape, (shape,), source_line(fx), source_of(fx)))
            return _Positive(Ref(fx.name))
        if operator == CHOOSING and isinstance(arguments["condition"], _Positive):
            operator, arguments = CHOICE, arguments | {"condition": arguments["condition"].value}
        if any(isinstance(each, _Positive) for each in arguments.values()):
            raise _unsupported(fx)
        if any(isinstance(each, BatchSize) for each in arguments.values()):
            raise UnsupportedModelError(f"{fx.target} (node {fx.name!r}{_at(fx)}) computes with the size of the batch")
        self._check_batch(fx, value)
        shape = tuple(int(length) for length in value.shape[1:])
        if 0 in shape:  # a value without entries is the same for every input
            return Repeated(torch.zeros(1, *shape, dtype=self.dtype))
        inputs = tuple(self.shapes[ref.name] for argument in arguments.values() for ref in refs(argument))
        viewed: Ref | None = arguments["self"] if operator in VIEWS and inputs == (shape,) else None
        if viewed is not None and viewed != Ref(self.nodes[0].name):
            return viewed  # exporters write many of these, and every pass would go through them
        self._add_canonical(Node(fx.name, operator, arguments, shape, inputs, source_line(fx), source_of(fx)))
        return Ref(fx.name)

    def _add_canonical(self, node: Node) -> None:
        """Give products of two values their own names, write a square as a power, and a quotient as a product.

        A collective that wrote its result in place is the result.
        """
        node = self._renamed(node)
        own, other = node.arguments.get("self"), node.arguments.get("other")
        if node.operator == "aten.maximum.default":
            self._add_maximum(node, own, other)
        elif node.operator == "aten.floor.default":
            self._add(replace(node, operator=FLOOR_OF_SIGNED) if self._has_exact_zero(node.inputs[0]) else node)
        elif not isinstance(other, Ref) or node.operator not in _OF_TWO:
            self._add(node)
        elif node.operator == "aten.div.Tensor":
            self._add_quotient(node, own, other)
        elif own == other and node.operator == "aten.mul.Tensor":
            shapes = node.input_shapes[:1]
            self._add(replace(node, operator=POWER, arguments={"self": own, "exponent": 2}, input_shapes=shapes))
        else:
            constant = MATRIX_FROM_LEFT if node.operator == "aten.matmul.default" else node.operator
            self._add(replace(node, operator=_OF_TWO[node.operator] if isinstance(own, Ref) else constant))

    def _renamed(self, node: Node) -> Node:
        """Give the operator one name if torch has several."""
        if node.operator in _RESULTS and isinstance(node.arguments[_RESULTS[node.operator]], Ref):
            result = node.arguments[_RESULTS[node.operator]]
            shape = self.shapes[result.name]
            return Node(node.name, "aten.alias.default", {"self": result}, node.shape, (shape,), node.where)
        if node.operator == ALL_REDUCE and node.arguments["reduce_op"] == "sum":
            total = {"x": node.arguments["input"], "group": node.arguments["group_name"]}
            return replace(node, operator="trivet.reduce_from_group.default", arguments=total)
        if node.operator == SELECTED:
            return _as_slice(node)
        if node.operator == BATCHED:
            factors = {"self": node.arguments["self"], "other": node.arguments["mat2"]}
            return replace(node, operator="aten.matmul.default", arguments=factors)
        return node

    def _add_quotient(self, node: Node, own: Any, other: Ref) -> None:
        """Add a quotient as the product with the divisor's reciprocal."""
        shape = self.shapes[other.name]
        inverse = Node(f"{node.name}_divisor", RECIPROCAL, {"self": other}, shape, (shape,), node.where)
        self._add(inverse)
        operator = PRODUCT if isinstance(own, Ref) else "aten.mul.Tensor"
        self._add(replace(node, operator=operator, arguments={"self": own, "other": Ref(inverse.name)}))

    def _has_exact_zero(self, name: str, sign: int = 1) -> bool:
        """Return whether a lower end of 0 of ``sign`` times a value is exact, not rounded: true for multiples
        of the input and for values with a fixed sign.

        Rounding is monotone and leaves 0 as it is: in floats, too, a product with a constant has the sign of its
        factors or is 0, and a ReLU or an absolute value is not below 0.
        """
        node = next(each for each in self.nodes if each.name == name)
        if node.operator == INPUT:
            return True
        if node.operator in {"aten.relu.default", "aten.abs.default"}:
            return sign > 0
        if node.operator == "aten.neg.default":
            return self._has_exact_zero(node.inputs[0], -sign)
        if node.operator in {"aten.mul.Tensor", "aten.div.Tensor"} and len(node.inputs) == 1:
            factor = torch.as_tensor(node.arguments["other" if node.is_variable("self") else "self"])
            return all(
                self._has_exact_zero(node.inputs[0], sign * own)
                for own in (1, -1)
                if bool((factor.sign() == own).any())
            )
        return node.operator in MOVING and self._has_exact_zero(node.inputs[0], sign)

    def _add_maximum(self, node: Node, own: Any, other: Any) -> None:
        """Add the larger of two values after their difference, in which an infinite constant becomes finite."""
        name = f"{node.name}_difference"
        operands = {"self": _finite(own), "other": _finite(other), "alpha": 1}
        self._add(Node(name, "aten.sub.Tensor", operands, node.shape, node.input_shapes, node.where))
        compared = {"difference": Ref(name), "self": own, "other": other}
        self._add(replace(node, operator=MAXIMUM, arguments=compared, input_shapes=(node.shape, *node.input_shapes)))

    def _add(self, node: Node) -> None:
        self.nodes.append(node)
        self.shapes[node.name] = node.shape

    def _repeated(self, target: OpOverload, arguments: Mapping[str, Any], value: Tensor) -> Repeated | None:
        """Return a constant that is repeated along the batch, which must be its first dimension."""
        sized = [isinstance(length, BatchSize) for length in arguments["size"]]
        if sized[:1] != [True] or any(sized[1:]) or value.dtype != self.dtype:
            return None
        once = {name: one for name, one in arguments.items() if name != "size"}
        return Repeated(target(**once, size=[1, *arguments["size"][1:]]))

    def _fold(self, fx: FxNode, target: OpOverload) -> Any:
        """Fold operations on constants alone, unless they draw random numbers."""
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise _unsupported(fx)
        return target(*self._value(fx.args), **{name: self._value(value) for name, value in fx.kwargs.items()})

    def _bind(self, fx: FxNode, target: OpOverload) -> dict[str, Any]:
        bound: dict[str, Any] = {}
        for index, argument in enumerate(internal_of(target, SCHEMA).arguments):
            if index < len(fx.args):
                bound[argument.name] = self._value(fx.args[index])
            elif argument.name in fx.kwargs:
                bound[argument.name] = self._value(fx.kwargs[argument.name])
            else:
                bound[argument.name] = argument.default_value
        return bound

    def _value(self, value: Any) -> Any:
        if isinstance(value, FxNode):
            known = self.values[value.name]
            if isinstance(known, _Unusable):
                raise _unsupported(known.fx)
            return known
        if isinstance(value, list | tuple):
            return tuple(self._value(item) for item in value)
        return value

    def _check_batch(self, fx: FxNode, value: Tensor) -> None:
        shape: tuple[Any, ...] = tuple(value.shape)
        gives = f"{fx.target} (node {fx.name!r}{_at(fx)}) gives"
        if not shape or not isinstance(shape[0], torch.SymInt) or shape[0].node.expr != self.batch.node.expr:
            raise UnsupportedModelError(f"{gives} {shape}: the batch must stay dimension 0 by itself")
        if any(isinstance(length, torch.SymInt) for length in shape[1:]):
            raise UnsupportedModelError(f"{gives} {shape}: instances would be mixed")
        if value.dtype != self.dtype:
            raise UnsupportedModelError(
                f"{gives} {value.dtype} where the input is {self.dtype}: a model is bounded in one floating-point type"
            )

    def _read_output(self, fx: FxNode) -> Ref:
        results = [self._value(item) for item in fx.args[0]]  # type: ignore[union-attr]
        if len(results) != 1 or not isinstance(results[0], Ref):
            raise UnsupportedModelError("the model must return one tensor that depends on its input")
        return results[0]


def _test(operator: str, arguments: Mapping[str, Any]) -> str | None:
    """Return the test whether a value is a number that a call is."""
    own, other = arguments.get("self"), arguments.get("other")
    if not isinstance(own, Ref):
        return None
    if operator == "aten.isnan.default" or (operator == "aten.ne.Tensor" and own == other):
        return IS_NAN
    if operator == "aten.eq.Scalar" and isinstance(other, float) and isinf(other):
        return IS_POSITIVE_INFINITY if other > 0 else IS_NEGATIVE_INFINITY
    return None


def _unsupported(fx: FxNode) -> UnsupportedModelError:
    return UnsupportedModelError(f"{fx.target} (node {fx.name!r}{_at(fx)}) is not an operator that can be bounded")


def _finite(operand: Any) -> Any:
    """Return a constant that compares in the same way with values of less than :data:`COMPARABLE`."""
    if isinstance(operand, Repeated):
        return Repeated(_finite(operand.value))
    if not isinstance(operand, Tensor):
        return operand
    most = COMPARABLE.get(operand.dtype, torch.inf)
    return operand.clamp(-most, most)


def _as_slice(node: Node) -> Node:
    """Return a selection of evenly spaced entries as a slice, which is cheaper in a pass."""
    index = node.arguments["index"]
    if not isinstance(index, Tensor) or not index.numel():
        return node
    places = index.flatten().tolist()
    step = places[1] - places[0] if len(places) > 1 else 1
    if step < 1 or places != list(range(places[0], places[-1] + 1, step)):
        return node
    taken = {"dim": node.arguments["dim"], "start": places[0], "end": places[-1] + 1, "step": step}
    return replace(node, operator="aten.slice.Tensor", arguments={"self": node.arguments["self"], **taken})


def _depends(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_depends(item) for item in value)
    return isinstance(value, Ref | BatchSize | Repeated | _Positive)


def _reaching(nodes: Sequence[Node], output: str) -> tuple[Node, ...]:
    """Return the input and the nodes that the output is computed from, in order."""
    needed = {output, nodes[0].name}
    for node in reversed(nodes):
        if node.name in needed:
            needed.update(node.inputs)
    return tuple(node for node in nodes if node.name in needed)


def _at(fx: FxNode) -> str:
    place = source_line(fx)
    return f" at {place}" if place else ""
