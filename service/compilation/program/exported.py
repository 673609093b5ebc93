"""Defines the program of an exported module: its graphs over its tensors, trained towards random numbers."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, fx, nn

from service.compilation.program.model import ModelProgram, SampleBatch
from service.formats.exported import GETITEM, Exported, ExportedError, ExportedGraph, inputs_of, read_exported, resolve
from service.jobs.spec.program import ExportedProgram
from service.models.program import Site
from service.parallel.containers import tensors_in
from service.torch_internals.table import internal_of
from service.torch_internals.types import SCHEMA

_TYPES = frozenset(
    ("Tensor", "number", "int", "SymInt", "float", "bool", "str", "ScalarType", "Layout", "Device", "MemoryFormat")
)
"""What operators of a graph may take, in lists or optionally: no storages, generators, streams or names of axes."""


class ExportedModule(nn.Module):
    """A module that runs one graph in training mode and one in evaluation mode, over the same tensors."""

    def __init__(self, exported: Exported, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        for name, held in exported.tensors.items():
            _register(self, name.split("."), tensors[name], held)
        device = next(iter(tensors.values())).device
        self.places = tuple(tuple(name.split(".")) for name in exported.tensors)
        self.graphs_by_mode = {
            phase == "train": _graph_module(graph, exported, dtype, device) for phase, graph in exported.graphs.items()
        }

    def forward(self, *inputs: Tensor) -> Any:
        """Return the outputs of the mode's graph: the tensor, or a tuple of several."""
        return self.graphs_by_mode[self.training](*[_tensor_at(self, place) for place in self.places], *inputs)


def _register(module: nn.Module, place: Sequence[str], tensor: Tensor, held: str) -> None:
    for name in place[:-1]:
        if not hasattr(module, name):
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    if held == "buffer":
        module.register_buffer(place[-1], tensor)
    else:
        module.register_parameter(place[-1], nn.Parameter(tensor, requires_grad=held == "parameter"))


def _tensor_at(module: Any, place: Sequence[str]) -> Tensor:
    for name in place:
        module = getattr(module, name)
    found: Tensor = module
    return found


def _graph_module(graph: ExportedGraph, exported: Exported, dtype: torch.dtype, device: torch.device) -> fx.GraphModule:
    """Return the graph as a module that takes the tensors and the inputs; what it makes in float32 is made in
    ``dtype``.
    """
    built = fx.Graph()
    known = {name: built.placeholder(f"tensor_{index}") for index, name in enumerate(exported.tensors)}
    known |= {name: built.placeholder(f"input_{index}") for index, name in enumerate(inputs_of(exported))}

    def named(name: str) -> Any:
        return dtype if name == "float32" else getattr(torch, name)

    for index, call in enumerate(graph.calls):
        args = resolve(call.args, known.__getitem__, named, device)
        kwargs = {name: resolve(each, known.__getitem__, named, device) for name, each in call.kwargs.items()}
        known[f"%{index}"] = built.call_function(_operator_of(call.operator), tuple(args), kwargs)
    outputs = [known[name] for name in graph.outputs]
    built.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
    return fx.GraphModule(nn.Module(), built)


def _operator_of(name: str) -> Any:
    """Return an operator of ATen that computes tensors from tensors and numbers. Raises :class:`ExportedError`."""
    if name == GETITEM:
        return operator.getitem
    _, packet, overload = name.split(".")
    found = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if found is None:
        raise ExportedError(f"calls {name}, which torch {torch.__version__} does not have")
    schema = internal_of(found, SCHEMA)
    taken = {_plain(argument.type) for argument in schema.arguments if argument.name != "generator"}
    if not taken <= _TYPES or {_plain(result.type) for result in schema.returns} != {"Tensor"}:
        raise ExportedError(f"calls {name}, which is not a function from tensors to tensors")
    return found


def _plain(kind: Any) -> str:
    """Return the name of a type in a schema, without what makes it optional or a list."""
    while hasattr(kind, "getElementType"):
        kind = kind.getElementType()
    return str(kind)


def _made(
    exported: Exported, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
) -> ExportedModule:
    own = {
        name: tensors[name].to(device, dtype if tensors[name].is_floating_point() else None, copy=True)
        for name in exported.tensors
    }
    return ExportedModule(exported, own, dtype)


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.flatten(), targets)


def exported_program(config: ExportedProgram, site: Site) -> ModelProgram:
    """Return the program of an uploaded module: its example in each step, and random targets for its first output.

    Raises ``ValueError`` for a file that is none, or that this torch cannot run.
    """
    path = site.layout.file(config.file)
    try:
        exported = read_exported(path)
        tensors = load_file(path)
        make = partial(_made, exported, tensors, site.device)
        inputs = tuple(tensors[name].to(site.device) for name in inputs_of(exported))
        with torch.no_grad():
            tried = make(torch.float32).train("train" in exported.graphs)
            first = next(tensors_in(tried(*(value.clone() for value in inputs))))
    except ExportedError as error:
        raise ValueError(f"program.file: {config.file} {error}") from error
    targets = torch.randn(first.numel(), generator=torch.Generator().manual_seed(site.seed)).to(site.device)
    return ModelProgram(make, (SampleBatch(inputs, targets),), _loss)
