"""The outputs of an ONNX file that can be bounded: a label beside its scores is left out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import onnx
from onnx import TensorProto, helper

from service.formats.onnx_dependence import Dependence, Numbered

_CLASSIFIER = ("ai.onnx.ml", "LinearClassifier")
_ZIPPED = ("ai.onnx.ml", "ZipMap")
_PLACES = frozenset({"ArgMax", "ArgMin"})
"""Operators that make a label of scores."""
_CHOSEN = "trivet.outputs"


def without_maps(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with scores as a tensor where it gives them as a map from label to score."""
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
    """Return the model without labels, and without the outputs that other nodes than ``supported`` are needed for; with
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
    """Return whether all outputs, labels too, are numbers that only ``supported`` nodes are needed for."""
    if any(_is_text(output) or output.name in texts_in(model) for output in model.graph.output):
        return False
    needed = found.needed([output.name for output in model.graph.output])
    return all(index in supported for index, _ in needed)


def bounded_before(nodes: Iterable[Numbered], found: Dependence, supported: Collection[int]) -> tuple[str, ...]:
    """Return the values that ``nodes`` read and that no other nodes than ``supported`` are needed for."""
    read = dict.fromkeys(name for _, node in nodes for name in node.input if name in found.values)
    needed = {name: found.needed([name]) for name in read}
    return tuple(name for name, each in needed.items() if each and all(index in supported for index, _ in each))
