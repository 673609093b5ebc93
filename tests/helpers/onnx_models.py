"""Small ONNX models, built in memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SEED = np.random.default_rng(5)


def weights(*shape: int, draw: np.random.Generator = SEED) -> np.ndarray[Any, Any]:
    return np.asarray(draw.normal(size=shape) / max(1, shape[0]) ** 0.5, dtype=np.float32)


def node(operator: str, inputs: Sequence[str], outputs: str | Sequence[str] = "y", **attributes: Any) -> onnx.NodeProto:
    names = [outputs] if isinstance(outputs, str) else list(outputs)
    return helper.make_node(operator, list(inputs), names, name=f"{operator.lower()}_{names[0]}", **attributes)


def model(  # noqa: PLR0917 - keywords of a fixture
    nodes: Sequence[onnx.NodeProto],
    shape: Sequence[int | str],
    constants: dict[str, Any] | None = None,
    outputs: Sequence[str] = ("y",),
    opset: int = 17,
    kind: int = TensorProto.FLOAT,
) -> bytes:
    """Input ``x`` of ``shape``; constants by name."""
    graph = helper.make_graph(
        list(nodes),
        "small",
        [helper.make_tensor_value_info("x", kind, list(shape))],
        [helper.make_tensor_value_info(name, kind, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    domains = sorted({each.domain for each in nodes if each.domain})
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    made = helper.make_model(graph, opset_imports=imports, ir_version=8 if opset > 9 else 6)
    data: bytes = made.SerializeToString()
    return data


def dense(widths: Sequence[int], batch: int | str = "batch", scale: float = 1.0) -> bytes:
    """Layers with ReLU between, the same in every process."""
    nodes: list[onnx.NodeProto] = []
    constants: dict[str, np.ndarray[Any, Any]] = {}
    draw = np.random.default_rng(5)
    name = "x"
    for index, (inputs, outputs) in enumerate(pairwise(widths)):
        constants |= {
            f"w{index}": scale * weights(outputs, inputs, draw=draw),
            f"b{index}": scale * weights(outputs, draw=draw),
        }
        last = index == len(widths) - 2
        target = "y" if last else f"z{index}"
        nodes.append(node("Gemm", [name, f"w{index}", f"b{index}"], target, transB=1))
        if not last:
            nodes.append(node("Relu", [target], f"a{index}"))
            name = f"a{index}"
    return model(nodes, [batch, widths[0]], constants)
