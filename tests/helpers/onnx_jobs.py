"""Verification jobs on an uploaded ONNX model and VNN-LIB queries about it."""

from __future__ import annotations

from typing import Any

import torch
from onnx_models import dense

from benchmarks.recording_reporter import upload
from service.bounds.onnx import load
from service.jobs.files import DataLayout
from service.jobs.spec.verify import VerifySpec

NETWORK = dense([3, 10, 10, 2])


DECLARED = "".join(f"(declare-const {name} Real)" for name in ("X_0", "X_1", "X_2", "Y_0", "Y_1"))


BOX = "".join(f"(assert (<= X_{index} 1))(assert (>= X_{index} -1))" for index in range(3))


def specification(data: DataLayout, query: str, **fields: Any) -> VerifySpec:
    given = {"model": {"onnx": upload(data, NETWORK)}, "property": {"vnnlib": upload(data, query.encode())}, **fields}
    return VerifySpec.model_validate({"device": "cpu", **given})


def reach() -> tuple[float, float]:
    """Of ``y0`` at many inputs of the box."""
    x = 2 * torch.rand(20000, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64) - 1
    y = load(NETWORK).double()(x)[:, 0]
    return float(y.min()), float(y.max())
