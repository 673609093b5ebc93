"""Damaged ONNX files: each is read or refused in words that say where, before a job and in its ranks."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from lanes import first_fast, slow_but_for
from onnx import TensorProto, helper, numpy_helper
from onnx_models import model, node
from onnx_mutations import of_a_field, of_bytes, small_models

from service.bounds.graph import UnsupportedModelError
from service.bounds.interval import Interval
from service.bounds.methods import METHODS, BoundOptions
from service.bounds.network import prepare
from service.bounds.onnx import load
from service.formats.onnx import OnnxError, outline, outline_of
from service.formats.onnx.inputs import MOST_ENTRIES

MODELS = small_models()
MUTATIONS = 20
FEW = 8
"""What the fast command takes."""


@pytest.mark.parametrize("name", first_fast(2, MODELS))
def test_the_models_themselves_are_read_and_bounded(name: str) -> None:
    assert outline_of(MODELS[name]) is not None
    assert bounded(MODELS[name])


@pytest.mark.parametrize("mutated", [of_bytes, of_a_field])
@pytest.mark.parametrize(
    ("name", "count"), slow_but_for([("dense", FEW), *((name, MUTATIONS) for name in MODELS)], ("dense", FEW))
)
def test_a_damaged_model_is_read_or_refused_in_words(
    name: str, count: int, mutated: Callable[[bytes, random.Random], bytes]
) -> None:
    """Any other exception ends the test, which has 160 of these files in all."""
    refused = 0
    for seed in range(count):
        data = mutated(MODELS[name], random.Random(f"{name} {seed}"))
        refused += not outlined(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # what is computed from such weights overflows
            bounded(data)
    assert 0 < refused < count


def outlined(data: bytes) -> bool:
    """Whether it is read; else it has to be refused in one line."""
    said = None
    try:
        outline_of(data)
    except OnnxError as error:
        said = str(error)
    assert said is None or (said and "\n" not in said)
    return said is None


def bounded(data: bytes) -> bool:
    """Whether it is read and bounded by a rank; else it has to be refused by name."""
    try:
        module = load(data)
        network = prepare(module, (module.features,))
    except UnsupportedModelError:
        return False
    box = Interval(-torch.ones(1, module.features), torch.ones(1, module.features))
    with torch.no_grad():
        least = METHODS["crown"](network, box, BoundOptions()).lower_bounds(torch.eye(module.outputs)[None])
    return least.shape == (1, module.outputs)


def edited(name: str, change: Callable[[onnx.ModelProto], None]) -> bytes:
    made = onnx.load_from_string(MODELS[name])
    change(made)
    return bytes(made.SerializeToString())


def initializer(made: onnx.ModelProto, name: str) -> TensorProto:
    return next(each for each in made.graph.initializer if each.name == name)


def attribute(made: onnx.ModelProto, operator: str) -> onnx.AttributeProto:
    return next(each for each in made.graph.node if each.op_type == operator).attribute[0]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("dense", lambda made: initializer(made, "w0").dims.append(99), "initializer 'w0' has 48 bytes; expected 4752"),
        ("dense", lambda made: initializer(made, "w0").ClearField("raw_data"), "initializer 'w0' has 0 numbers"),
        ("dense", lambda made: initializer(made, "b0").dims.__setitem__(0, -4), "'b0' has shape [-4]"),
        ("dense", lambda made: initializer(made, "b0").dims.extend([2**62] * 400), "initializer 'b0' has 16 bytes"),
        ("dense", lambda made: setattr(initializer(made, "b0"), "data_type", 0), "'b0' is of type UNDEFINED"),
        ("dense", lambda made: setattr(initializer(made, "b0"), "data_type", 77), "'b0' is of type number 77"),
        (
            "convolution",
            lambda made: setattr(attribute(made, "LeakyRelu"), "f", float("nan")),
            "attribute 'alpha' of node 'leakyrelu_a' is nan; expected a finite number",
        ),
        (
            "convolution",
            lambda made: attribute(made, "Constant").t.ClearField("raw_data"),
            "attribute 'value' of node 'constant_shape' has 0 numbers; expected 2",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(name: str, change: Callable[[onnx.ModelProto], None], words: str) -> None:
    for read, error in ((outline_of, OnnxError), (load, UnsupportedModelError)):
        with pytest.raises(error) as refused:
            read(edited(name, change))
        assert words in str(refused.value)
        assert len(str(refused.value)) < 300


@pytest.mark.parametrize("shape", [[1] + [2**62] * 400, [2**31 - 1, 3], [1, MOST_ENTRIES + 1]])
@pytest.mark.parametrize("side", ["input", "output"])
def test_inputs_and_outputs_larger_than_any_models_are_refused(shape: list[int], side: str) -> None:
    def change(made: onnx.ModelProto) -> None:
        value = getattr(made.graph, side)[0]
        value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, shape))

    with pytest.raises(OnnxError, match=f"at most {MOST_ENTRIES} entries are supported") as refused:
        outline_of(edited("dense", change))
    assert len(str(refused.value)) < 300


def elsewhere(values: object, location: str = "/etc/passwd") -> TensorProto:
    """A tensor whose numbers are in another file."""
    tensor = numpy_helper.from_array(np.asarray(values), "elsewhere")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def in_an_initializer() -> bytes:
    return edited("dense", lambda made: initializer(made, "w0").CopyFrom(elsewhere(np.ones((4, 3), np.float32))))


def in_an_attribute() -> bytes:
    constant = node("Constant", [], "c", value=elsewhere(np.ones(2, np.float32)))
    return model([constant, node("Add", ["x", "c"])], [1, 2])


def in_an_attribute_of_many() -> bytes:
    odd = node("Odd", [], "c", values=[elsewhere(np.ones(2, np.float32))])
    return model([odd, node("Add", ["x", "c"])], [1, 2])


def in_a_graph_within_an_attribute() -> bytes:
    constant = node("Constant", [], "c", value=elsewhere(np.ones(2, np.float32)))
    branch = helper.make_graph([constant], "branch", [], [helper.make_tensor_value_info("c", TensorProto.FLOAT, [2])])
    chosen = node("If", ["condition"], "chosen", then_branch=branch, else_branch=branch)
    return model([chosen, node("Add", ["x", "chosen"])], [1, 2], {"condition": np.array(True)})


def in_a_sparse_tensor() -> bytes:
    made = onnx.load_from_string(model([node("Add", ["x", "c"])], [1, 2], {"c": np.ones(2, np.float32)}))
    indices = numpy_helper.from_array(np.array([0]), "indices")
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(elsewhere(np.ones(1, np.float32)), indices, [2]))
    return bytes(made.SerializeToString())


@pytest.mark.parametrize(
    ("made", "where"),
    [
        (in_an_initializer, "initializer 'elsewhere'"),
        (in_an_attribute, "attribute 'value' of node 'constant_c'"),
        (in_an_attribute_of_many, "attribute 'values' of node 'odd_c'"),
        (in_a_graph_within_an_attribute, "attribute 'value' of node 'constant_c'"),
        (in_a_sparse_tensor, "sparse initializer 'elsewhere'"),
    ],
)
def test_numbers_in_another_file_are_refused_wherever_they_are(
    tmp_path: Path, made: Callable[[], bytes], where: str
) -> None:
    """Else a rank would read that file of its own machine into the bounds."""
    words = f"{where} is kept in another file; expected a zip of the model and that file"
    file = tmp_path / "model.onnx"
    file.write_bytes(made())
    with pytest.raises(OnnxError) as refused:
        outline(file)
    assert str(refused.value).startswith(words)
    with pytest.raises(UnsupportedModelError) as later:
        load(made())
    assert str(later.value).startswith(words)
