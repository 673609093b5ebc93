"""Models in half precision: their rows say what rounding adds to bounds."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_jobs import specification, upload
from onnx_models import model, node
from verify_jobs import context

from service.bounds.onnx.reading import Runtime, parse
from service.jobs.files import DataLayout
from service.verification import job

WEIGHTS = np.random.default_rng(1).normal(size=(3, 2))
BOX = {"lower": [0.9, -1.1, 0.3], "upper": [1.1, -0.9, 0.5]}


def halves(kind: int) -> bytes:
    """A product of weights of that type, with inputs and outputs in float32."""
    nodes = [
        node("Cast", ["x"], "h", to=kind),
        node("MatMul", ["h", "w"], "m"),
        node("Cast", ["m"], to=TensorProto.FLOAT),
    ]
    proto = onnx.load_from_string(model(nodes, [1, 3]))
    proto.graph.initializer.append(helper.make_tensor("w", kind, [3, 2], WEIGHTS.reshape(-1).tolist()))
    content: bytes = proto.SerializeToString()
    return content


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            TensorProto.FLOAT16,
            "float16: bounds are of the model's function of real numbers; onnxruntime's rounding adds",
        ),
        (TensorProto.BFLOAT16, "bfloat16: bounds are of the model's function of real numbers; what rounding to 8 bits"),
    ],
    ids=["float16", "bfloat16"],
)
def test_a_row_says_what_rounding_adds_to_its_bounds(data: DataLayout, kind: int, words: str) -> None:
    ranked, report = context(data)
    content = halves(kind)
    spec = specification(data, "", model={"onnx": upload(data, content)}, property={"box": BOX})
    result = job.run(spec, ranked)
    assert result is not None
    (row,) = report.bounds
    assert row["note"].startswith(words)
    assert result["note"] == row["note"]
    held = numpy_helper.to_array(onnx.load_from_string(content).graph.initializer[0]).astype(np.float64)
    centre, radius = np.array([1.0, -1.0, 0.4]) @ held, np.array([0.1, 0.1, 0.1]) @ np.abs(held)
    assert row["lower"] == pytest.approx(centre - radius, abs=1e-5)
    assert row["upper"] == pytest.approx(centre + radius, abs=1e-5)


def test_what_float16_adds_is_what_was_seen(data: DataLayout) -> None:
    ranked, report = context(data)
    content = model([node("MatMul", ["x", "w"])], [1, 3], {"w": WEIGHTS.astype(np.float16)}, kind=TensorProto.FLOAT16)
    job.run(specification(data, "", model={"onnx": upload(data, content)}, property={"box": BOX}), ranked)
    said = float(report.bounds[0]["note"].split("adds to them, ")[1].split()[0])
    x = np.array([1.0, -1.0, 0.4])
    held = numpy_helper.to_array(onnx.load_from_string(content).graph.initializer[0]).astype(np.float64)
    seen = np.abs(Runtime.of(parse(content)).flat(x.astype(np.float32)) - x.astype(np.float32) @ held).max()
    assert 0 < seen < 4 * said < 0.01


def test_a_model_without_them_says_nothing(data: DataLayout) -> None:
    ranked, report = context(data)
    job.run(specification(data, "", property={"box": {"lower": [-1] * 3, "upper": [1] * 3}}), ranked)
    assert report.bounds[0]["note"] is None
