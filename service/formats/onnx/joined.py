"""Puts networks side by side in one ONNX file, whose outputs may be their hidden values and inputs, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import compose, helper, shape_inference

from service.formats.onnx.content import read_message
from service.formats.onnx.inputs import inputs_of
from service.formats.onnx.kinds import OnnxError, first_line
from service.formats.onnx.model_file import opset_of
from service.formats.onnx.outputs import marked


@dataclass(frozen=True)
class JoinedPart:
    """A network of a joined file, by the name that messages give it, and the hidden values that become outputs."""

    name: str
    content: bytes
    hidden: tuple[str, ...] = ()


def join_networks(parts: Sequence[JoinedPart], *, gives_inputs: bool = False) -> bytes:
    """Return the content of a file with the inputs of all parts, and as outputs each part's hidden values and outputs;
    behind all of them, if it ``gives_inputs``, the inputs. Raises :class:`OnnxError`.
    """
    models = [_prefixed(part, f"{place}.") for place, part in enumerate(parts)]
    first = models[0]
    for part, model in zip(parts[1:], models[1:], strict=True):
        _check_alike(parts[0].name, first, part.name, model)
        for name in ("node", "initializer", "sparse_initializer", "input", "output", "value_info"):
            getattr(first.graph, name).extend(getattr(model.graph, name))
        first.functions.extend(model.functions)
        known = {each.domain for each in first.opset_import}
        first.opset_import.extend(each for each in model.opset_import if each.domain not in known)
    if gives_inputs:
        _show(first, [(value.name, value.type) for value in inputs_of(first)])
    found: bytes = marked(first).SerializeToString()
    return found


def _prefixed(part: JoinedPart, prefix: str) -> onnx.ModelProto:
    """Return a part's model with its hidden values before its outputs, all names beginning with the prefix."""
    model = read_message(part.content)
    inner = {name for node in model.graph.node for name in node.output if name}
    if missing := [name for name in part.hidden if name not in inner]:
        raise OnnxError(f"network {part.name} computes no value {', '.join(map(repr, missing))}")
    if part.hidden:
        own = list(model.graph.output)
        types = {value.name: value.type for value in (*_inferred(model).graph.value_info, *own)}
        del model.graph.output[:]
        _show(model, [(name, types.get(name, onnx.TypeProto())) for name in part.hidden])
        model.graph.output.extend(own)
    return compose.add_prefix(model, prefix)


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    try:
        return shape_inference.infer_shapes(model)
    except Exception as error:  # onnx raises types of its own, one for each kind of fault
        raise OnnxError(f"the shapes within the network are not consistent: {first_line(error)}") from error


def _show(model: onnx.ModelProto, values: Sequence[tuple[str, onnx.TypeProto]]) -> None:
    """Append values to the outputs, each under a name of its own."""
    for place, (name, kind) in enumerate(values):
        shown = f"shown.{place}.{name}"
        model.graph.node.append(helper.make_node("Identity", [name], [shown]))
        model.graph.output.append(onnx.ValueInfoProto(name=shown, type=kind))


def _check_alike(name: str, model: onnx.ModelProto, other: str, another: onnx.ModelProto) -> None:
    """Check that two networks can be in one file: by versions of operators, and by the type of their inputs."""
    if opset_of(model) != opset_of(another):
        opsets = f"{opset_of(model)} and {opset_of(another)}"
        raise OnnxError(f"networks {name} and {other} are of ONNX opsets {opsets}, expected one opset for both")
    versions = {each.domain: each.version for each in model.opset_import}
    for each in another.opset_import:
        if (own := versions.get(each.domain, each.version)) != each.version:
            both = f"{own} and {each.version}"
            raise OnnxError(f"networks {name} and {other} have {each.domain} in versions {both}, expected one for both")
    kinds = {value.type.tensor_type.elem_type for each in (model, another) for value in inputs_of(each)}
    if len(kinds) > 1:
        raise OnnxError(f"networks {name} and {other} take inputs of several types, expected one type for both")
