"""Makes networks like cifar_biasfield of VNN-COMP 2022: a convolutional network behind a bias field of sixteen inputs.

An image is multiplied by a field, a polynomial over its pixels of third degree, whose sixteen coefficients are the
inputs: an affine layer from them to the pixels comes before the network. The query asks whether another class than the
image's may come out on top for any coefficients close to those of no field, one disjunct for each class.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[np.float32]
DEGREE = 4
"""Powers of either coordinate."""
CLASSES = 10


@dataclass(frozen=True)
class Size:
    """``side`` pixels of three colours; ``convolutions`` are output channels and strides; ``hidden`` neurons follow."""

    side: int
    convolutions: tuple[tuple[int, int], ...]
    hidden: int


REAL = Size(32, ((32, 1), (32, 2), (64, 1), (64, 2), (64, 1), (64, 1), (128, 2), (128, 1)), 100)
SMALL = Size(8, ((4, 1), (4, 2), (8, 1), (8, 2)), 96)


@dataclass(frozen=True)
class Problem:
    """An ONNX file and a VNN-LIB query about it."""

    onnx: bytes
    vnnlib: str


def problem(size: Size, radius: float, seed: int = 0) -> Problem:
    """A network with random weights, and whether its class changes for coefficients of up to ``radius``."""
    draw = np.random.default_rng(seed)
    image = draw.uniform(0.2, 0.8, (3, size.side, size.side))
    content = network(size, image, draw)
    return Problem(content, query(radius, predicted(content)))


def field(image: NDArray[np.float64]) -> Array:
    """The share of each coefficient in the pixels, ``(pixels, 16)``."""
    along = np.linspace(-1, 1, image.shape[1])
    powers = along ** np.arange(DEGREE)[:, None]
    terms = np.einsum("ai,bj->abij", powers, powers).reshape(DEGREE**2, 1, *image.shape[1:])
    return np.asarray((terms * image).reshape(DEGREE**2, -1).T, dtype=np.float32)


def network(size: Size, image: NDArray[np.float64], draw: np.random.Generator) -> bytes:
    """``(1, 16)`` coefficients to the scores of ten classes."""
    constants: dict[str, Array | NDArray[np.int64]] = {
        "field": field(image),
        "image": np.asarray(image.reshape(-1), dtype=np.float32),
        "pixels": np.array([1, 3, size.side, size.side]),
    }
    nodes = [
        helper.make_node("Gemm", ["coefficients", "field", "image"], ["lit"], transB=1),
        helper.make_node("Reshape", ["lit", "pixels"], ["pixels_lit"]),
    ]
    name, channels, side = "pixels_lit", 3, size.side
    for index, (width, stride) in enumerate(size.convolutions):
        constants[f"kernel{index}"] = _weights(draw, width, channels, 3, 3)
        constants[f"offset{index}"] = _weights(draw, width)
        given = [name, f"kernel{index}", f"offset{index}"]
        nodes.append(helper.make_node("Conv", given, [f"conv{index}"], strides=[stride] * 2, pads=[1] * 4))
        nodes.append(helper.make_node("Relu", [f"conv{index}"], [f"relu{index}"]))
        name, channels, side = f"relu{index}", width, -(-side // stride)
    nodes.append(helper.make_node("Flatten", [name], ["flat"]))
    constants |= {
        "hidden": _weights(draw, size.hidden, channels * side**2),
        "hidden_offset": np.zeros(size.hidden, np.float32),
    }
    constants |= {"out": _weights(draw, CLASSES, size.hidden), "out_offset": np.zeros(CLASSES, np.float32)}
    nodes.append(helper.make_node("Gemm", ["flat", "hidden", "hidden_offset"], ["hidden_sum"], transB=1))
    nodes.append(helper.make_node("Relu", ["hidden_sum"], ["hidden_relu"]))
    nodes.append(helper.make_node("Gemm", ["hidden_relu", "out", "out_offset"], ["scores"], transB=1))
    graph = helper.make_graph(
        nodes,
        "biasfield",
        [helper.make_tensor_value_info("coefficients", TensorProto.FLOAT, [1, DEGREE**2])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, CLASSES])],
        [numpy_helper.from_array(value, key) for key, value in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return bytes(made.SerializeToString())


def _weights(draw: np.random.Generator, *shape: int) -> Array:
    """So that values keep their size from layer to layer."""
    fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else 100
    return np.asarray(draw.normal(size=shape) * np.sqrt(2 / fan_in), dtype=np.float32)


def predicted(content: bytes) -> int:
    """The class without a field."""
    from onnxruntime import InferenceSession

    session = InferenceSession(content, providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {"coefficients": np.zeros((1, DEGREE**2), np.float32)})
    return int(np.asarray(scores).argmax())


def query(radius: float, label: int) -> str:
    """VNN-LIB: some other class's score is at least the label's."""
    lines = [f"(declare-const X_{index} Real)" for index in range(DEGREE**2)]
    lines += [f"(declare-const Y_{index} Real)" for index in range(CLASSES)]
    for index in range(DEGREE**2):
        lines += [f"(assert (>= X_{index} {-radius}))", f"(assert (<= X_{index} {radius}))"]
    others = " ".join(f"(and (>= Y_{other} Y_{label}))" for other in range(CLASSES) if other != label)
    return "\n".join([*lines, f"(assert (or {others}))"])
