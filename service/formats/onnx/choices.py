"""Applies a spec's choices to an ONNX file: its outputs, fixed inputs, and open lengths."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from service.formats.onnx.content import read_message
from service.formats.onnx.inputs import batch_of_one, inputs_of, open_lengths
from service.formats.onnx.kinds import OnnxError, type_name
from service.formats.onnx.model_file import outline_of
from service.formats.onnx.outputs import marked
from service.jobs.spec.verify import FromOnnx


class ChoiceError(OnnxError):
    """The file lacks the chosen item; ``field`` is the spec's, ``expected`` names the possible values."""

    def __init__(self, field: str, message: str, expected: str) -> None:
        super().__init__(message)
        self.field, self.expected = f"model.{field}", expected


def chosen(content: bytes, model: FromOnnx) -> bytes:
    """Return the content of a file in which nothing is left to choose, from one compressed by gzip or not.

    Raises :class:`OnnxError`; a :class:`ChoiceError` if the file lacks the choice.
    """
    if not model.choices():
        return content
    message = read_message(content)
    for name, length in model.dimensions.items():
        _set_length(message, name, length)
    for name, value in model.inputs.items():
        _fix(message, name, value)
    if model.inputs and not inputs_of(message):
        raise ChoiceError("inputs", "every input of the model is fixed", "one at least that is not")
    if model.outputs:
        _choose(message, model.outputs)
    found: bytes = message.SerializeToString()
    return found


def with_labels(content: bytes) -> bytes:
    """Return the content of a file with all outputs chosen, also labels, which are otherwise left out."""
    found: bytes = marked(read_message(content)).SerializeToString()
    return found


def _set_length(model: onnx.ModelProto, name: str, length: int) -> None:
    """Set an open length of an input, everywhere its name stands."""
    known = dict.fromkeys(each for value in inputs_of(model) for each in open_lengths(value).values())
    if name not in known:
        listed = ", ".join(map(repr, known)) or "none, as every length is in the file"
        raise ChoiceError("dimensions", f"the model leaves no length {name!r} open", listed)
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for place, each in open_lengths(value).items():
            if each == name:
                value.type.tensor_type.shape.dim[place].dim_value = length


def _fix(model: onnx.ModelProto, name: str, value: float | Sequence[float]) -> None:
    """Make an initializer of an input."""
    given = {each.name: each for each in inputs_of(model)}
    if name not in given:
        raise ChoiceError("inputs", f"the model has no input {name!r}", ", ".join(map(repr, given)))
    kind, shape = given[name].type.tensor_type.elem_type, batch_of_one(given[name])
    numbers = np.full(prod(shape), value) if isinstance(value, float) else np.array(value)
    if len(numbers) != prod(shape):
        message = f"input {name!r} is fixed to {len(numbers)} numbers"
        raise ChoiceError("inputs", message, f"one, or the {prod(shape)} of its shape {list(shape)}")
    if kind not in helper.get_all_tensor_dtypes() or kind == TensorProto.STRING:
        raise ChoiceError("inputs", f"input {name!r} is {type_name(kind)}", "an input of numbers")
    fixed = numbers.astype(helper.tensor_dtype_to_np_dtype(kind))
    if not helper.tensor_dtype_to_np_dtype(kind).kind == "f" and bool((fixed.astype(np.float64) != numbers).any()):
        raise ChoiceError("inputs", f"input {name!r} is fixed to what no {type_name(kind)} is", "whole numbers of it")
    model.graph.initializer.append(numpy_helper.from_array(fixed.reshape(shape), name))


def _choose(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Make these values the outputs; it must be possible to bound all of them."""
    own = {output.name: output for output in model.graph.output}
    inner = {name for node in model.graph.node for name in node.output if name}
    if unknown := [name for name in names if name not in inner | own.keys()]:
        listed = ", ".join(map(repr, own))
        message = f"the model gives no value {', '.join(map(repr, unknown))}"
        raise ChoiceError("outputs", message, f"some of its outputs {listed}, or of the values within it")
    kept = [own.get(name) or helper.make_empty_tensor_value_info(name) for name in dict.fromkeys(names)]
    copies = [onnx.ValueInfoProto.FromString(output.SerializeToString()) for output in kept]
    for output in copies:  # each alone: of several, those without a rule would be left out
        _set_outputs(model, [output])
        found = outline_of(model.SerializeToString())
        if found.unsupported:
            message = f"{output.name!r} needs {', '.join(found.unsupported[:3])}, without a rule"
            raise ChoiceError("outputs", message, ", ".join(map(repr, found.instead)) or "others")
    _set_outputs(marked(model), copies)


def _set_outputs(model: onnx.ModelProto, outputs: Sequence[onnx.ValueInfoProto]) -> None:
    del model.graph.output[:]
    model.graph.output.extend(outputs)
