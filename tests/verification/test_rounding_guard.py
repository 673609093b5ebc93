"""Verdicts that only rounding explains: no verified is said of them."""

from __future__ import annotations

import numpy as np
import pytest
from lanes import first_fast
from onnx_jobs import specification, upload
from onnx_models import model, node
from verify_jobs import context

from service.jobs.files import DataLayout
from service.verification import job
from service.verification.rounding_guard import REASON


def hidden() -> bytes:
    """``relu(x + 1e9) − 1e9``, x over the reals, and a multiple of 64 in float32."""
    nodes = [node("Add", ["x", "c"], "h"), node("Relu", ["h"], "r"), node("Sub", ["r", "c"])]
    return model(nodes, [1, 1], {"c": np.float32(1e9)})


def of_small_exponentials() -> bytes:
    return model([node("ReduceLogSumExp", ["x"], axes=[1])], [1, 3], opset=13)


def plain() -> bytes:
    return model([node("Relu", ["x"], "r"), node("Mul", ["r", "c"])], [1, 1], {"c": np.float32(3)})


@pytest.mark.parametrize(
    ("network", "ends", "most", "verdict"),
    first_fast(
        2,
        [
            (hidden(), ([0.0], [1.0]), 0.5, "unknown"),
            (of_small_exponentials(), ([-103.05] * 3, [-102.95] * 3), -101.88, "unknown"),
            (of_small_exponentials(), ([-103.05] * 3, [-102.95] * 3), -101.8, "verified"),
            (plain(), ([-1.0], [1.0]), 3.01, "verified"),
        ],
    ),
)
def test_what_only_rounding_proves_is_unknown(
    data: DataLayout, network: bytes, ends: tuple[list[float], list[float]], most: float, verdict: str
) -> None:
    """A second look in float64 keeps what holds there."""
    box = {"lower": ends[0], "upper": ends[1], "output": [{"coefficients": [-1], "threshold": -most}]}
    ranked, report = context(data)
    job.run(specification(data, "", model={"onnx": upload(data, network)}, property={"box": box}, method="ibp"), ranked)
    (row,) = report.bounds
    assert row["verdict"] == verdict
    assert verdict == "verified" or row["reason"] in {REASON, "the bounds do not decide it"}
