"""The outputs of an ONNX file that can be bounded: a label beside its scores is left out."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx
from onnx import helper

from service.formats.onnx_dependence import Dependence, Numbered

_CLASSIFIER = ("ai.onnx.ml", "LinearClassifier")
_ZIPPED = ("ai.onnx.ml", "ZipMap")


def without_maps(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with scores as a tensor where it gives them as a map from label to score."""
    zipped = {node.output[0]: node.input[0] for node in model.graph.node if (node.domain, node.op_type) == _ZIPPED}
    for output in model.graph.output:
        if output.name in zipped:
            output.CopyFrom(helper.make_empty_tensor_value_info(zipped[output.name]))
    return model


def labels_in(model: onnx.ModelProto) -> set[str]:
    """Return the labels that classifiers give beside their scores."""
    return {node.output[0] for node in model.graph.node if (node.domain, node.op_type) == _CLASSIFIER}


def scores_only(model: onnx.ModelProto, found: Dependence, supported: Collection[int]) -> onnx.ModelProto:
    """Return the model without labels, and without the outputs that other nodes than ``supported`` are needed for; with
    all of them if nothing else is left.
    """
    labels = labels_in(model)
    kept = [
        output
        for output in model.graph.output
        if output.name not in labels and all(index in supported for index, _ in found.needed([output.name]))
    ]
    if kept and len(kept) < len(model.graph.output):
        kept = [onnx.ValueInfoProto.FromString(output.SerializeToString()) for output in kept]
        del model.graph.output[:]
        model.graph.output.extend(kept)
    return model


def bounded_before(nodes: Iterable[Numbered], found: Dependence, supported: Collection[int]) -> tuple[str, ...]:
    """Return the values that ``nodes`` read and that no other nodes than ``supported`` are needed for."""
    read = dict.fromkeys(name for _, node in nodes for name in node.input if name in found.values)
    needed = {name: found.needed([name]) for name in read}
    return tuple(name for name, each in needed.items() if each and all(index in supported for index, _ in each))
