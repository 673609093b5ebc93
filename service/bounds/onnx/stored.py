"""An ONNX model that was read once, in files that ranks map: a rank reads only the constants that it uses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper
from safetensors.numpy import save_file
from safetensors.torch import load_file

from service.bounds.onnx.model import OnnxModel, is_float, model_of
from service.bounds.onnx.reading import Description, call_of, describe, parse, values_of
from service.bounds.onnx.unrolled import written_out
from service.bounds.operators.conversion import Array, Call
from service.formats.onnx import FLOATS, graph_input, opset_of, precision_of

NODES, CONSTANTS, ABOUT = "nodes.onnx", "constants.safetensors", "about.json"
EXACT, FLOAT = "exact.", "float."
"""Prefixes of constants stored as the file has them, and of those converted to the floating-point type of bounds."""
VERSION = 4
"""The form of the files."""
NUMPY: Mapping[torch.dtype, type[np.floating[Any]]] = {torch.float32: np.float32, torch.float64: np.float64}


def store(folder: Path, content: bytes, dtype: torch.dtype) -> None:
    """Write the model of an ONNX file's content, for bounds in ``dtype``.

    Raises :class:`UnsupportedModelError` if it cannot be read.
    """
    model = written_out(parse(content), values_of)
    found = describe(model)
    folder.mkdir(parents=True)
    (folder / NODES).write_bytes(_without_weights(model, found.calls).SerializeToString())
    forms = (_forms(name, array, NUMPY[dtype]) for name, array in found.constants.items())
    save_file({name: each for constant in forms for name, each in constant}, folder / CONSTANTS)
    about = {"shapes": found.shapes, "input": found.input, "outputs": found.outputs, "type": _type_name(model)}
    (folder / ABOUT).write_text(json.dumps(about))


def store_type(folder: Path, content: bytes) -> None:
    """Write only what :func:`type_of` and :func:`stored_precision` return.

    Raises :class:`UnsupportedModelError` if the file cannot be read.
    """
    model = parse(content)
    folder.mkdir(parents=True)
    (folder / ABOUT).write_text(json.dumps({"type": _type_name(model), "precision": precision_of(model)}))


def _type_name(model: onnx.ModelProto) -> str:
    return np.dtype(FLOATS[graph_input(model).type.tensor_type.elem_type]).name


def stored(folder: Path, dtype: torch.dtype) -> OnnxModel:
    """Return the model in the ``dtype`` that it was stored for, its weights mapped; it is not checked yet.

    Raises :class:`UnsupportedModelError` that names the operators that there are no converters for.
    """
    nodes, about = onnx.load_from_string((folder / NODES).read_bytes()), json.loads((folder / ABOUT).read_bytes())
    opset, tensors = opset_of(nodes), load_file(folder / CONSTANTS)
    description = Description(
        [call_of(node, index, opset) for index, node in enumerate(nodes.graph.node)],
        {name.removeprefix(EXACT): each.numpy() for name, each in tensors.items() if name.startswith(EXACT)},
        {name: tuple(shape) for name, shape in about["shapes"].items()},
        about["input"],
        tuple(about["outputs"]),
    )
    floats = {name.removeprefix(FLOAT): each for name, each in tensors.items() if name.startswith(FLOAT)}
    same = {name: tensors[EXACT + name] for name in description.constants if name not in floats}
    return model_of(description, same | floats).to(dtype)


def type_of(folder: Path) -> type[np.floating[Any]]:
    """Return the input's."""
    found: type[np.floating[Any]] = np.dtype(json.loads((folder / ABOUT).read_bytes())["type"]).type
    return found


def stored_precision(folder: Path) -> str | None:
    """Return the half precision of numbers within the model, if any."""
    found: str | None = json.loads((folder / ABOUT).read_bytes())["precision"]
    return found


def _forms(name: str, array: Array, kind: type[np.floating[Any]]) -> list[tuple[str, Array]]:
    """numpy knows bfloat16 only as a type of ours; float32 has all of its numbers."""
    exact = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    # Of an array without dimensions this would make one with a dimension.
    forms = [(EXACT + name, np.ascontiguousarray(exact).reshape(exact.shape))]
    if is_float(exact) and exact.dtype != kind:
        forms.append((FLOAT + name, exact.astype(kind)))
    return forms


def _without_weights(model: onnx.ModelProto, calls: Sequence[Call]) -> onnx.ModelProto:
    """Return the nodes that are called, under the names that errors have for them."""
    bare = onnx.ModelProto(ir_version=model.ir_version)
    bare.opset_import.extend(model.opset_import)
    nodes = {tuple(node.output): node for node in model.graph.node}
    for call in calls:
        kept = bare.graph.node.add()
        kept.CopyFrom(nodes[call.outputs])
        kept.name = call.name
        if kept.op_type == "Cast":  # as it was read: to what, or to nothing else
            del kept.attribute[:]
            kept.op_type = call.operator
            kept.attribute.extend(helper.make_attribute(name, value) for name, value in call.attributes.items())
    return bare
