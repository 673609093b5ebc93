"""Exports a live module: checks that no value decides about its graph, and writes it as ONNX or as graphs and tensors.

torch is imported by these functions alone; the rest of the client works without it.
"""

from __future__ import annotations

import json
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.formats.exported import DEVICE, GETITEM, METADATA, NAMED, NAMES, REFERENCE, refused, source_line
from trivet.errors import ModuleRefused

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.export import ExportedProgram

PHASES = ("train", "inference")


def check_mode(module: nn.Module) -> None:
    training = [name for name, part in module.named_modules() if part.training]
    if training:
        where = f"its part {training[0]!r} is" if training[0] else "it is"
        raise ModuleRefused(
            f"{type(module).__name__}: {where} in training mode, in which dropout draws numbers and BatchNorm takes "
            "those of the batch; expected module.eval()"
        )


def arithmetic(module: nn.Module, allowed: Sequence[torch.dtype]) -> tuple[torch.dtype, torch.device]:
    """Return the one floating-point type of a module's tensors, and their one device.

    Raises :class:`ModuleRefused` by the name of a tensor of another type or device.
    """
    import torch  # noqa: PLC0415 - as above

    dtype: torch.dtype | None = None
    device: torch.device | None = None
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type == "meta":
            raise ModuleRefused(f"{name} has no values: it is on the meta device")
        device = device or tensor.device
        if tensor.device != device:
            raise ModuleRefused(f"{name} is on {tensor.device}, and others on {device}; expected one device")
        if not tensor.is_floating_point():
            continue
        dtype = dtype or tensor.dtype
        if tensor.dtype != dtype or dtype not in allowed:
            names = " or ".join(str(each).removeprefix("torch.") for each in allowed)
            raise ModuleRefused(f"{name} is {tensor.dtype}; expected {names} in all of the module")
    return dtype or torch.float32, device or torch.device("cpu")


def _exported(module: nn.Module, inputs: tuple[Tensor, ...]) -> ExportedProgram:
    """Return the module's graph at these shapes. Raises :class:`ModuleRefused` where values decide how it goes on, or
    which shapes it has.
    """
    import torch  # noqa: PLC0415 - as above

    try:
        program = torch.export.export(module, inputs)
    except Exception as error:
        place = _place(module, error)
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ModuleRefused(f"{type(module).__name__} cannot be exported{place}: {said[0]}") from error
    for node in program.graph.nodes:
        value = node.meta.get("val")
        lengths = value.shape if isinstance(value, torch.Tensor) else ()
        if node.op == "call_function" and any(
            isinstance(each, torch.SymInt | torch.SymFloat | torch.SymBool) for each in (value, *lengths)
        ):
            made = node.args[0] if node.target is operator.getitem else node
            raise ModuleRefused(
                f"{type(module).__name__} cannot be exported{_of_node(made)}: {made.target} gives a number or a shape "
                "that depends on the values of tensors"
            )
    return program


def _place(module: nn.Module, error: BaseException) -> str:
    """Return the part of the module and the line of its source that raised, as far as frames tell."""
    import torch  # noqa: PLC0415 - as above

    names = {id(part): name for name, part in module.named_modules()}
    library, found = str(Path(torch.__file__).parent), ""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        own = names.get(id(frame.f_locals.get("self")))
        if own is not None and not frame.f_code.co_filename.startswith(library):
            part = f" in {own!r}" if own else ""
            found = f"{part} at {Path(frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _of_node(node: Any) -> str:
    """Return the part of the module and the line that made a node of its graph, or the first within the node's own
    graph.
    """
    if not node.meta.get("stack_trace"):
        inner = [getattr(node.graph.owning_module, str(each.target), None) for each in node.all_input_nodes]
        calls = [each for found in inner for each in getattr(getattr(found, "graph", None), "nodes", ())]
        node = next((each for each in calls if each.meta.get("stack_trace")), node)
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    part = stack[-1][0].removeprefix("L['self'].") if stack else ""
    line = source_line(node)
    return (f" in {part!r}" if part and part != "L['self']" else "") + (f" at {line}" if line else "")


def write_onnx(module: nn.Module, inputs: tuple[Tensor, ...], path: Path) -> None:
    """Write a module as ONNX, of whose graph torch.export has said that no value decides about it."""
    import torch  # noqa: PLC0415 - as above

    _exported(module, inputs)
    names = [f"input_{index}" for index in range(len(inputs))]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this exporter needs no further package; the newer one does
            torch.onnx.export(module, inputs, str(path), input_names=names, dynamo=False)
    except Exception as error:
        raise ModuleRefused(f"{type(module).__name__} cannot be written as ONNX: {error}") from error


def write_exported(module: nn.Module, inputs: tuple[Tensor, ...], phases: Sequence[str], path: Path) -> None:
    """Write the graphs of a module in each phase, its tensors and the example."""
    import torch  # noqa: PLC0415 - as above
    from safetensors.torch import save_file  # noqa: PLC0415 - as above

    _, device = arithmetic(module, (torch.float32,))
    for index, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(f"example: input {index} is {value!r}; expected a tensor of one dimension or more")
    writer = _GraphWriter(module)
    given, graphs = tuple(value.detach().to(device) for value in inputs), {}
    for phase in phases:
        if phase not in PHASES:
            raise ValueError(f"phases: {phase!r}; expected {' or '.join(PHASES)}")
        with _in_mode(module, phase == "train"):
            graphs[phase] = writer.graph(_exported(module, given))
    about = {"module": type(module).__name__, "tensors": writer.held, "inputs": len(inputs), "graphs": graphs}
    tensors = {**writer.tensors, **{f"${index}": value for index, value in enumerate(given)}}
    contents = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    save_file(contents, path, {METADATA: json.dumps(about)})


@contextmanager
def _in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Put a module into a mode; then put each part back into its own."""
    before = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, mode in before:
            part.training = mode


class _GraphWriter:
    """Writes graphs of one module as JSON, and collects the tensors that they name, each once."""

    def __init__(self, module: nn.Module) -> None:
        self.name = type(module).__name__
        self.tensors: dict[str, Tensor] = {}
        self.held: dict[str, str] = {}
        self._names: dict[int, str] = {}

    def graph(self, program: ExportedProgram) -> dict[str, Any]:
        """Return the calls of a graph, and the names of its outputs."""
        signature = program.graph_signature
        kept = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        values: dict[str, Tensor] = {**program.constants, **program.state_dict}
        names: dict[Any, str] = {}
        calls: list[dict[str, Any]] = []
        inputs, outputs = 0, []
        for node in program.graph.nodes:
            if node.op == "placeholder" and node.name in kept:
                names[node] = self._tensor(kept[node.name], values[kept[node.name]])
            elif node.op == "placeholder":
                names[node] = f"${inputs}"
                inputs += 1
            elif node.op == "call_function":
                if (call := self._call(node, names)) is not None:
                    names[node] = f"%{len(calls)}"
                    calls.append(call)
            elif node.op == "output":
                outputs = [names[each] for each in node.args[0] if each in names]
        if signature.buffers_to_mutate or not outputs:
            raise ModuleRefused(f"{self.name}: it returns no tensor, or torch.export has moved its updates of buffers")
        return {"calls": calls, "outputs": outputs}

    def _tensor(self, name: str, value: Tensor) -> str:
        """Return the name under which a tensor is written: one name for one that the module has in several places."""
        import torch  # noqa: PLC0415 - as above

        known = self._names.setdefault(id(value), name)
        if known != name or name in self.tensors:
            return known
        place = value.untyped_storage().data_ptr()
        for other, written in self.tensors.items():
            if written.untyped_storage().data_ptr() == place and value.numel():
                raise ModuleRefused(f"{name} is a view of {other}; expected tensors of their own, or one in two places")
        self.tensors[name] = value
        trained = "parameter" if value.requires_grad else "frozen"
        self.held[name] = trained if isinstance(value, torch.nn.Parameter) else "buffer"
        return name

    def _call(self, node: Any, names: Mapping[Any, str]) -> dict[str, Any] | None:
        """Return one call; ``None`` for an assertion about a tensor's type, which export adds."""
        target = GETITEM if node.target is operator.getitem else str(node.target)
        if target == "aten._assert_tensor_metadata.default":
            return None
        if (reason := refused(target)) is not None:
            raise ModuleRefused(f"{self.name}{_of_node(node)} {reason}")

        def written(value: Any) -> Any:
            return self._value(node, value, names)

        kwargs = {name: written(value) for name, value in node.kwargs.items() if name != "pin_memory"}
        return {"operator": target, "args": list(map(written, node.args)), "kwargs": kwargs, "at": source_line(node)}

    def _value(self, node: Any, value: Any, names: Mapping[Any, str]) -> Any:
        import torch  # noqa: PLC0415 - as above

        if isinstance(value, list | tuple):
            return [self._value(node, each, names) for each in value]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.device):
            return {DEVICE: None}
        if (name := names.get(value)) is not None:
            return {REFERENCE: name}
        if (name := str(value).removeprefix("torch.")) in NAMES:
            return {NAMED: name}
        raise ModuleRefused(f"{self.name}{_of_node(node)}: {node.target} takes {value!r}, which cannot be written")
