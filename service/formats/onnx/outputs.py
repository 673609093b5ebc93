"""Finds the outputs of an ONNX file that can be bounded: a label beside its scores cannot, and is left out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import prod

import onnx
from onnx import TensorProto, helper, shape_inference

from service.formats.onnx.dependence import Dependence, Numbered
from service.formats.onnx.inputs import lengths_of

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
    return with_outputs(model, kept) if kept and len(kept) < len(model.graph.output) else model


def with_outputs(model: onnx.ModelProto, outputs: Iterable[onnx.ValueInfoProto]) -> onnx.ModelProto:
    """Return the model with these outputs, which may be some of its own, in place of all of them."""
    copies = [onnx.ValueInfoProto.FromString(output.SerializeToString()) for output in outputs]
    del model.graph.output[:]
    model.graph.output.extend(copies)
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


def entries_of_outputs(model: onnx.ModelProto) -> int | None:
    """Return the entries of all outputs together, if the file declares them."""
    outputs = [_entries(value) for value in model.graph.output]
    known = [each for each in outputs if each is not None]
    return sum(known) if len(known) == len(outputs) else None


def shape_of_output(model: onnx.ModelProto) -> tuple[int, ...] | None:
    """Return the shape of the only output at a batch of one, if there is no other and the file declares it."""
    (value, *others) = model.graph.output
    return None if others or _entries(value) is None else tuple(max(length, 1) for length in lengths_of(value))


def rival_of(model: onnx.ModelProto, given: Sequence[onnx.ValueInfoProto]) -> tuple[str, int | None]:
    """Return the name of the first of the ``given`` outputs if the model has it no more, and it may have as many
    entries as those that are left, and how many, if that is known; an empty name otherwise.
    """
    first, left = given[0], {output.name for output in model.graph.output}
    if first.name in left or _is_text(first) or first.name in texts_in(model):
        return "", None
    own, others = _entries(first), entries_of_outputs(model)
    if own is None or others is None:
        own, others = _inferred(model, [first]), _inferred(model, model.graph.output)
    return (first.name, own) if None in (own, others) or own == others else ("", None)


def _inferred(model: onnx.ModelProto, outputs: Iterable[onnx.ValueInfoProto]) -> int | None:
    """Return the entries of outputs whose lengths follow from those of the input."""
    asked = onnx.ModelProto.FromString(model.SerializeToString())
    del asked.graph.output[:]
    asked.graph.output.extend(helper.make_empty_tensor_value_info(output.name) for output in outputs)
    try:
        return entries_of_outputs(shape_inference.infer_shapes(asked))
    except Exception:  # onnx raises types of its own, one for each kind of fault; a run refuses the file
        return None


def _entries(value: onnx.ValueInfoProto) -> int | None:
    """Return the number of entries of one instance, if the file declares every length but the first."""
    if not value.type.tensor_type.HasField("shape"):
        return None
    lengths = lengths_of(value)
    return None if any(length < 1 for length in lengths[1:]) else prod(max(length, 1) for length in lengths)
