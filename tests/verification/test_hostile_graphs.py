"""Random graphs with everything that has made a value something else than a number, judged by onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hostile_judge import fault_in, fault_of, judged
from onnx import TensorProto
from onnx_models import model, node

from service.jobs.files import DataLayout


def faults(seeds: range, data: DataLayout) -> dict[int, str]:
    """What is wrong with bounds of these graphs, and with verdicts about every third one."""
    found = {seed: fault_of(seed, data, asks=seed % 3 == 0) for seed in seeds}
    return {seed: fault for seed, fault in found.items() if fault}


def test_no_bound_is_wrong_and_nothing_is_falsely_verified(tmp_path: Path) -> None:
    assert faults(range(4), DataLayout(tmp_path)) == {}


CLIPPED_AND_CAST = [
    node("Log", ["x"], "l"),
    node("Clip", ["l", "low", "high"], "c"),
    node("Cast", ["c"], "w", to=TensorProto.INT32),
    node("Cast", ["w"], to=TensorProto.FLOAT),
]
"""What is no number is cast to a whole one, far outside of the bounds."""
NORMALISED = [node("LayerNormalization", ["x", "weight"], epsilon=0.0)]
"""The variance is 0 where all entries are the same, and nowhere else."""
CONSTANTS = {"low": np.float32(0), "high": np.float32(1), "weight": np.ones(3, dtype=np.float32)}


@pytest.mark.parametrize("nodes", [CLIPPED_AND_CAST, NORMALISED], ids=["clipped and cast", "normalised"])
def test_where_no_number_comes_out_a_note_says_so_and_nothing_is_verified(
    tmp_path: Path, nodes: list[onnx.NodeProto]
) -> None:
    used = {name for each in nodes for name in each.input}
    content = model(nodes, (1, 3), {name: value for name, value in CONSTANTS.items() if name in used})
    lower, upper = np.full(3, -0.5, dtype=np.float32), np.full(3, 1.5, dtype=np.float32)
    points = np.stack([lower, upper, np.full(3, 0.25, dtype=np.float32), np.array([0, 0.5, 1], dtype=np.float32)])
    graph = judged(content, lower, upper, points)
    assert graph is not None
    assert [fault_in(graph, DataLayout(tmp_path), seed, asks=True) for seed in range(2)] == ["", ""]
    assert nodes is NORMALISED or graph.outside()


@pytest.mark.slow(60)
@pytest.mark.parametrize("start", range(1000, 2000, 100))
def test_nor_of_a_thousand_graphs(tmp_path: Path, start: int) -> None:
    assert faults(range(start, start + 100), DataLayout(tmp_path)) == {}
