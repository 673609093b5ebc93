"""The types of numbers in ONNX files, and the error for a file that cannot be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import TensorProto

FLOATS: Mapping[int, type[np.floating[Any]]] = {
    TensorProto.FLOAT: np.float32,
    TensorProto.DOUBLE: np.float64,
    TensorProto.FLOAT16: np.float16,
}


class OnnxError(ValueError):
    """The file is not an ONNX model of a form that can be read."""


def type_name(kind: int) -> str:
    known = TensorProto.DataType.values()
    return str(TensorProto.DataType.Name(kind)) if kind in known else f"number {kind}, which ONNX does not have"


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
