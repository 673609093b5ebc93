"""Joins the inputs of an ONNX file, and its outputs, into one of real numbers each, side by side in the file's order.

A label beside its scores cannot be bounded, and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from math import prod

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from service.formats.onnx.dependence import Dependence, Numbered

_INTEGERS = frozenset(
    getattr(TensorProto, name) for name in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
)
_SMALL = frozenset(getattr(TensorProto, name) for name in ("INT8", "INT16", "UINT8", "UINT16"))
CLIPS_BY_INPUTS = 11
"""The opset from which ``Clip`` has its ends as inputs, and not as attributes."""
SLICES_BY_INPUTS = 10
"""The opset from which ``Slice`` has its places as inputs, and not as attributes."""


def inputs_of(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs that are not initializers."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in weights]


def with_real_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with a floating-point input in place of each integer one; the integers are the whole
    numbers nearest to its entries, and of two equally near ones the larger; beyond the ends of a small type, its ends.
    """
    given = inputs_of(model)
    kinds = [value.type.tensor_type.elem_type for value in given]
    kind = next((each for each in kinds if each not in _INTEGERS), TensorProto.FLOAT)
    added = list[onnx.NodeProto]()
    for value, integer in zip(given, kinds, strict=True):
        if integer not in _INTEGERS:
            continue
        name, real = value.name, _free_name(model, f"{value.name}.real")
        half = np.array(0.5, helper.tensor_dtype_to_np_dtype(kind))
        model.graph.initializer.append(numpy_helper.from_array(half, f"{real}.half"))
        added += [
            helper.make_node("Add", [real, f"{real}.half"], [f"{real}.more"]),
            helper.make_node("Floor", [f"{real}.more"], [f"{real}.whole"]),
        ]
        clip = _within(model, integer, kind, f"{real}.whole", f"{real}.held")
        added += [*clip, helper.make_node("Cast", [f"{real}.held" if clip else f"{real}.whole"], [name], to=integer)]
        value.name, value.type.tensor_type.elem_type = real, kind
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*added, *nodes])
    return model


def _within(model: onnx.ModelProto, integer: int, kind: int, source: str, target: str) -> list[onnx.NodeProto]:
    """Return the nodes that clip whole numbers to those of a small type, which would wrap around beyond."""
    if integer not in _SMALL:
        return []
    ends = np.iinfo(helper.tensor_dtype_to_np_dtype(integer))
    if next(each.version for each in model.opset_import if each.domain in ("", "ai.onnx")) < CLIPS_BY_INPUTS:
        return [helper.make_node("Clip", [source], [target], min=float(ends.min), max=float(ends.max))]
    names = [f"{target}.least", f"{target}.most"]
    for name, end in zip(names, (ends.min, ends.max), strict=True):
        number = np.array(end, helper.tensor_dtype_to_np_dtype(kind))
        model.graph.initializer.append(numpy_helper.from_array(number, name))
    return [helper.make_node("Clip", [source, *names], [target])]


def with_one_input(
    model: onnx.ModelProto, opset: int, shape_of: Callable[[onnx.ValueInfoProto], tuple[int, ...]]
) -> onnx.ModelProto:
    """Return the model with one input ``(1, entries)`` from which its own are cut out, if it has several of one type.

    ``shape_of`` gives their shapes at a batch of one.
    """
    given = inputs_of(model)
    kinds = {value.type.tensor_type.elem_type for value in given}
    if len(given) < 2 or len(kinds) > 1:
        return model
    shapes = [shape_of(value) for value in given]
    ends = np.cumsum([prod(shape) for shape in shapes]).tolist()
    together = _free_name(model, "inputs")
    nodes = list(model.graph.node)
    others = [value for value in model.graph.input if value not in given]
    del model.graph.node[:], model.graph.input[:]
    model.graph.input.append(helper.make_tensor_value_info(together, kinds.pop(), [1, ends[-1]]))
    model.graph.input.extend(others)
    for value, shape, start, end in zip(given, shapes, [0, *ends], ends, strict=False):
        flat = f"{together}.{value.name}"
        model.graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), f"{flat}.shape"))
        model.graph.node.append(_slice(model.graph, opset, (together, flat), (start, end)))
        model.graph.node.append(helper.make_node("Reshape", [flat, f"{flat}.shape"], [value.name]))
    model.graph.node.extend(nodes)
    return model


def _slice(graph: onnx.GraphProto, opset: int, names: tuple[str, str], ends: tuple[int, int]) -> onnx.NodeProto:
    """Return the node that cuts entries out of the first of ``names``, as the second."""
    source, target = names
    if opset < SLICES_BY_INPUTS:
        return helper.make_node("Slice", [source], [target], starts=ends[:1], ends=ends[1:], axes=[1])
    places = [f"{target}.{name}" for name in ("start", "end", "axis")]
    for name, number in zip(places, (*ends, 1), strict=True):
        graph.initializer.append(numpy_helper.from_array(np.array([number], np.int64), name))
    return helper.make_node("Slice", [source, *places], [target])


def _free_name(model: onnx.ModelProto, name: str) -> str:
    graph = model.graph
    known: Sequence[str] = [name for node in graph.node for name in (*node.input, *node.output)]
    known = [*known, *(each.name for each in (*graph.input, *graph.output, *graph.initializer))]
    while any(each.startswith(name) for each in known):
        name += "_"
    return name


_CLASSIFIER = ("ai.onnx.ml", "LinearClassifier")
_ZIPPED = ("ai.onnx.ml", "ZipMap")
_PLACES = frozenset({"ArgMax", "ArgMin"})
"""Operators that turn scores into a label."""
_CHOSEN = "trivet.outputs"


def without_maps(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with scores as a tensor if it gives them as a map from label to score."""
    zipped = {node.output[0]: node.input[0] for node in model.graph.node if (node.domain, node.op_type) == _ZIPPED}
    for output in model.graph.output:
        if output.name in zipped:
            output.CopyFrom(helper.make_empty_tensor_value_info(zipped[output.name]))
    return model


def texts_in(model: onnx.ModelProto) -> set[str]:
    """Return the labels that classifiers give as texts beside their scores."""
    return {name for node, name in _labels(model) if any(each.name == "classlabels_strings" for each in node.attribute)}


def _labels(model: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, str]]:
    """Yield each classifier with the name of its label."""
    return ((node, node.output[0]) for node in model.graph.node if (node.domain, node.op_type) == _CLASSIFIER)


def scores_only(model: onnx.ModelProto, found: Dependence, supported: Collection[int]) -> onnx.ModelProto:
    """Return the model without labels, and without the outputs that need other nodes than ``supported``; with
    all of them if nothing else is left, or if they were :func:`marked` as chosen.
    """
    if any(each.key == _CHOSEN for each in model.metadata_props):
        return model
    labels = {name for _, name in _labels(model)}
    kept = [
        output
        for output in model.graph.output
        if output.name not in labels and not _is_text(output) and _is_score(found.needed([output.name]), supported)
    ]
    if kept and len(kept) < len(model.graph.output):
        kept = [onnx.ValueInfoProto.FromString(output.SerializeToString()) for output in kept]
        del model.graph.output[:]
        model.graph.output.extend(kept)
    return model


def _is_score(needed: Iterable[Numbered], supported: Collection[int]) -> bool:
    return all(index in supported and node.op_type not in _PLACES for index, node in needed)


def _is_text(output: onnx.ValueInfoProto) -> bool:
    return bool(output.type.tensor_type.elem_type == TensorProto.STRING)


def marked(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its outputs marked as chosen, so that none is left out."""
    model.metadata_props.add(key=_CHOSEN, value="yes")
    return model


def can_all_be_bounded(model: onnx.ModelProto, found: Dependence, supported: Collection[int]) -> bool:
    """Return whether all outputs, labels too, are numbers that need only ``supported`` nodes."""
    if any(_is_text(output) or output.name in texts_in(model) for output in model.graph.output):
        return False
    needed = found.needed([output.name for output in model.graph.output])
    return all(index in supported for index, _ in needed)


def bounded_before(nodes: Iterable[Numbered], found: Dependence, supported: Collection[int]) -> tuple[str, ...]:
    """Return the values that ``nodes`` read and that need only ``supported`` nodes."""
    read = dict.fromkeys(name for _, node in nodes for name in node.input if name in found.values)
    needed = {name: found.needed([name]) for name in read}
    return tuple(name for name, each in needed.items() if each and all(index in supported for index, _ in each))
