"""Reads an exported module: one safetensors file of its tensors and an example, whose metadata has its graphs as JSON.

A graph is a list of calls of ATen operators. Nothing in it is evaluated: a value is a number, a text, one of torch's
names below, or a reference. References are the name of a tensor in the file, ``$0`` for an input, ``%0`` for the
result of a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from service.jobs.spec.common import Strict
from service.jobs.spec.compile import Phase

METADATA = "trivet.exported"
"""The key of the graphs in the file's metadata."""
REFERENCE, NAMED, DEVICE = "ref", "torch", "device"
"""The keys of values that are no JSON: a reference, one of torch's names, and the device on which the module runs."""
GETITEM = "getitem"
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
NAMES = frozenset((*DTYPES, "strided", "contiguous_format", "preserve_format", "channels_last", "channels_last_3d"))
_OPERATOR = re.compile(r"aten\.([A-Za-z_][A-Za-z0-9_]*)\.([A-Za-z_][A-Za-z0-9_]*)")
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)', re.MULTILINE)
_TENSOR = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
_PRIVATE = frozenset(("_softmax", "_log_softmax", "_to_copy", "_unsafe_view"))
_OF_MEMORY = frozenset(("from_file", "set", "set_", "set_data", "pin_memory", "record_stream", "data_ptr"))
_MOST_CALLS = 100_000


class ExportedError(ValueError):
    """The file holds no exported module; the message is the end of a sentence about it."""


class OperatorCall(Strict):
    """One call of an operator; ``at`` is the line of the module's source that makes it."""

    operator: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    at: str = ""


class ExportedGraph(Strict):
    calls: tuple[OperatorCall, ...] = Field(max_length=_MOST_CALLS)
    outputs: tuple[str, ...] = Field(min_length=1)


class Exported(Strict):
    """A module: how each of its tensors is held, how many inputs it takes, and its graph in each phase."""

    module: str = Field(max_length=200)
    tensors: dict[str, Literal["parameter", "frozen", "buffer"]]
    inputs: int = Field(ge=1, le=100)
    graphs: dict[Phase, ExportedGraph] = Field(min_length=1)


def refused(operator: str) -> str | None:
    """Return why a graph may not call an operator; ``None`` if it may."""
    if operator == GETITEM:
        return None
    found = _OPERATOR.fullmatch(operator)
    if found is None:
        return f"calls {operator!r}; expected an operator of ATen"
    name = found[1]
    if name in _OF_MEMORY or name.startswith("resize") or (name.startswith("_") and name not in _PRIVATE):
        return f"calls {operator}, which is not for models"
    return None


def read_exported(path: Path) -> Exported:
    """Return what the header of a file says, checked: each call is allowed, each reference known before it is used.

    Raises :class:`ExportedError`.
    """
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - who only reads specs does without it

    try:
        with safe_open(path, framework="np") as opened:
            text, held = (opened.metadata() or {}).get(METADATA), frozenset(opened.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise ExportedError(f"is no safetensors file: {error}") from error
    if text is None:
        raise ExportedError("holds tensors without a graph; client.compile_check(module, example) writes one")
    try:
        exported = Exported.model_validate(json.loads(text))
    except (ValidationError, ValueError, RecursionError) as error:
        raise ExportedError(f"has a graph that cannot be read: {str(error)[:500]}") from error
    _check_tensors(exported, held)
    for graph in exported.graphs.values():
        _check_graph(graph, {*exported.tensors, *inputs_of(exported)})
    return exported


def inputs_of(exported: Exported) -> tuple[str, ...]:
    """Return the names of the inputs, which are those of the example's tensors in the file."""
    return tuple(f"${index}" for index in range(exported.inputs))


def _check_tensors(exported: Exported, held: Collection[str]) -> None:
    if missing := sorted({*exported.tensors, *inputs_of(exported)} - set(held)):
        raise ExportedError(f"lacks the tensor {missing[0]!r}, which its graph names")
    for name in exported.tensors:
        if not _TENSOR.fullmatch(name):
            raise ExportedError(f"has a tensor named {name!r}; expected a path of attributes")


def _check_graph(graph: ExportedGraph, known: set[str]) -> None:
    def check_reference(name: str) -> str:
        if name not in known:
            raise ExportedError(f"has a graph that uses {name!r} before it is there")
        return name

    for index, call in enumerate(graph.calls):
        if (reason := refused(call.operator)) is not None:
            raise ExportedError(f"has a graph that {reason}")
        resolve([call.args, *call.kwargs.values()], check_reference, check_name, None)
        known.add(f"%{index}")
    for name in graph.outputs:
        check_reference(name)


def check_name(name: str) -> str:
    """Return one of torch's names. Raises :class:`ExportedError` for another."""
    if name not in NAMES:
        raise ExportedError(f"has a graph with torch's name {name!r}; expected one of {', '.join(sorted(NAMES))}")
    return name


def resolve(value: Any, reference: Callable[[str], Any], named: Callable[[str], Any], device: Any) -> Any:
    """Return a value of a call with its references, torch's names and the device in their places.

    Raises :class:`ExportedError` for a value of another form.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [resolve(each, reference, named, device) for each in value]
    if isinstance(value, Mapping) and len(value) == 1:
        ((key, inner),) = value.items()
        if key == REFERENCE and isinstance(inner, str):
            return reference(inner)
        if key == NAMED and isinstance(inner, str):
            return named(inner)
        if key == DEVICE and inner is None:
            return device
    raise ExportedError(f"has a graph with the value {str(value)[:80]}")


def source_line(node: Any) -> str:
    """Return ``file.py:line`` of the innermost frame that the export recorded of a node of its graph; empty if none."""
    frames = _FRAME.findall(str(node.meta.get("stack_trace") or ""))
    return f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else ""
