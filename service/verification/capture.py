"""From a module to a :class:`Graph`: ``torch.export`` with a symbolic batch, decomposed to core ATen.

Collectives (``trivet::*``) are operators of their own and stay in the graph. Parameters are this rank's local
tensors. What depends on parameters only is computed here, once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, default_decompositions, export
from torch.fx import Node as FxNode

from service.parallel.tensor.placement import local
from service.verification.graph import BATCH, INPUT, Graph, Node, Ref, UnsupportedModel, refs

EXAMPLE_BATCH = 3  # 0 and 1 would be specialised; any other size stays symbolic
WHOLE = {"aten.linear.default", "aten.matmul.default"}  # composite operators that have rules of their own


class _Functional(nn.Module):
    """Calls a module with parameters that are given as inputs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = (module,)  # in a tuple, so that its parameters are not registered here

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> Any:
        return torch.func.functional_call(self._module[0], state, (x,))


def capture(module: nn.Module, input_shape: Sequence[int]) -> Graph:
    """The graph of ``module`` in evaluation mode, for inputs ``(batch, *input_shape)`` of the parameters' dtype.

    Raises :class:`UnsupportedModel` when it cannot be traced with a batch of any size, when an instance's result
    may depend on another's, or when it does not return one tensor.
    """
    held = (*module.named_parameters(), *module.named_buffers())
    state = {name: local(tensor).detach() for name, tensor in held}
    training = module.training
    module.eval()
    try:
        program = _export(module, state, tuple(input_shape))
    finally:
        module.train(training)
    return _Reader(program, state).read()


def _export(module: nn.Module, state: dict[str, Tensor], input_shape: tuple[int, ...]) -> ExportedProgram:
    like = next((tensor for tensor in state.values() if tensor.is_floating_point()), torch.empty(0))
    example = torch.zeros(EXAMPLE_BATCH, *input_shape, dtype=like.dtype, device=like.device)
    shapes = {"x": {0: Dim("batch")}, "state": dict.fromkeys(state)}
    table = default_decompositions()
    for operator in [operator for operator in table if str(operator) in WHOLE]:
        del table[operator]
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", FutureWarning)
            exported = export(_Functional(module), (example, state), dynamic_shapes=shapes, strict=False)
            return exported.run_decompositions(table)
    except Exception as error:
        raise UnsupportedModel(
            f"{type(module).__name__} cannot be traced for inputs (batch, {', '.join(map(str, input_shape))}) "
            f"with a batch of any size: {str(error).strip().splitlines()[0] if str(error).strip() else error!r}"
        ) from error


class _Reader:
    """Walks an exported program once: folds constants, types the nodes that depend on the input."""

    def __init__(self, program: ExportedProgram, state: Mapping[str, Tensor]) -> None:
        self.program = program
        self.values: dict[str, Any] = {}
        self.state = list(state.values())
        self.nodes: list[Node] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtype: torch.dtype = torch.float32
        self.batch: Any = None

    def read(self) -> Graph:
        self._read_placeholders()
        output: Ref | None = None
        for fx in self.program.graph.nodes:
            if fx.op == "call_function":
                self.values[fx.name] = self._read_call(fx)
            elif fx.op == "output":
                output = self._read_output(fx)
        if output is None:
            raise UnsupportedModel("the traced program has no output")
        return Graph(_reaching(self.nodes, output.name))

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
        target = fx.target
        arguments = self._bind(fx)
        if not any(_depends(value) for value in arguments.values()):
            return target(*arguments.values()) if _foldable(target) else self._unsupported(fx)  # type: ignore[operator]
        value = fx.meta.get("val")
        if isinstance(value, torch.SymInt):
            return BATCH if value.node.expr == self.batch.node.expr else self._unsupported(fx)
        if not isinstance(value, Tensor):
            self._unsupported(fx)
        assert isinstance(value, Tensor)
        self._check_batch(fx, value)
        shape = tuple(int(length) for length in value.shape[1:])
        inputs = tuple(self.shapes[ref.name] for argument in arguments.values() for ref in refs(argument))
        self._add(Node(fx.name, str(target), arguments, shape, inputs, _where(fx)))
        return Ref(fx.name)

    def _add(self, node: Node) -> None:
        self.nodes.append(node)
        self.shapes[node.name] = node.shape

    def _bind(self, fx: FxNode) -> dict[str, Any]:
        target = fx.target
        if not isinstance(target, torch._ops.OpOverload):
            self._unsupported(fx)
        schema = target._schema.arguments  # type: ignore[union-attr]
        bound: dict[str, Any] = {}
        for index, argument in enumerate(schema):
            if index < len(fx.args):
                bound[argument.name] = self._value(fx.args[index])
            elif argument.name in fx.kwargs:
                bound[argument.name] = self._value(fx.kwargs[argument.name])
            else:
                bound[argument.name] = argument.default_value
        return bound

    def _value(self, value: Any) -> Any:
        if isinstance(value, FxNode):
            return self.values[value.name]
        if isinstance(value, list | tuple):
            return tuple(self._value(item) for item in value)
        return value

    def _check_batch(self, fx: FxNode, value: Tensor) -> None:
        length = value.shape[0] if value.ndim else None
        rest = value.shape[1:]
        if not isinstance(length, torch.SymInt) or length.node.expr != self.batch.node.expr:
            raise UnsupportedModel(
                f"{fx.target} (node {fx.name!r}) gives {tuple(value.shape)}: the batch must stay dimension 0 by itself"
            )
        if value.dtype != self.dtype:
            raise UnsupportedModel(
                f"{fx.target} (node {fx.name!r}) gives {value.dtype} where the input is {self.dtype}: "
                "a model is bounded in one floating-point type"
            )
        if any(isinstance(item, torch.SymInt) for item in rest):
            raise UnsupportedModel(
                f"{fx.target} (node {fx.name!r}) gives {tuple(value.shape)}: instances would be mixed"
            )

    def _read_output(self, fx: FxNode) -> Ref:
        results = [self._value(item) for item in fx.args[0]]  # type: ignore[union-attr]
        if len(results) != 1 or not isinstance(results[0], Ref):
            raise UnsupportedModel("the model must return one tensor that depends on its input")
        return results[0]

    def _unsupported(self, fx: FxNode) -> Any:
        raise UnsupportedModel(f"{fx.target} (node {fx.name!r}{_at(fx)}) is not an operator that can be bounded")


def _depends(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_depends(item) for item in value)
    return isinstance(value, Ref) or value == BATCH if isinstance(value, Ref | str) else False


def _foldable(target: Any) -> bool:
    """Constants may be computed ahead unless that draws random numbers."""
    return torch.Tag.nondeterministic_seeded not in target.tags


def _reaching(nodes: Sequence[Node], output: str) -> tuple[Node, ...]:
    """The input and what the output is computed from, in order."""
    needed = {output, nodes[0].name}
    for node in reversed(nodes):
        if node.name in needed:
            needed.update(node.inputs)
    return tuple(node for node in nodes if node.name in needed)


def _where(fx: FxNode) -> str:
    """``file.py:line`` of the innermost frame that the trace recorded."""
    trace = str(fx.meta.get("stack_trace") or "")
    frames = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if not frames:
        return ""
    file, line = frames[-1].split(", ")[:2]
    return f"{file.removeprefix('File ').strip(chr(34)).rsplit('/', 1)[-1]}:{line.removeprefix('line ')}"


def _at(fx: FxNode) -> str:
    place = _where(fx)
    return f" at {place}" if place else ""
