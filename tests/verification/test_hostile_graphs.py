"""Random graphs with everything that has made a value something else than a number, judged by onnxruntime."""

from __future__ import annotations

from pathlib import Path

import pytest
from hostile_judge import fault_of

from service.jobs.files import DataLayout


def faults(seeds: range, data: DataLayout) -> dict[int, str]:
    """What is wrong with bounds of these graphs, and with verdicts about every third one."""
    found = {seed: fault_of(seed, data, asks=seed % 3 == 0) for seed in seeds}
    return {seed: fault for seed, fault in found.items() if fault}


def test_no_bound_is_wrong_and_nothing_is_falsely_verified(tmp_path: Path) -> None:
    assert faults(range(4), DataLayout(tmp_path)) == {}


@pytest.mark.parametrize(
    "seed",
    [
        20261421,  # what is no number is cast to a whole one, outside of the bounds, and a note says so
        20262120,  # a variance is 0 at one input of the box alone
        20262123,  # a small epsilon enlarges the rounding of plain bounds
    ],
)
def test_graphs_that_were_wrong_once_are_right(tmp_path: Path, seed: int) -> None:
    assert fault_of(seed, DataLayout(tmp_path), asks=True) == ""


@pytest.mark.slow(60)
@pytest.mark.parametrize("start", range(1000, 2000, 100))
def test_nor_of_a_thousand_graphs(tmp_path: Path, start: int) -> None:
    assert faults(range(start, start + 100), DataLayout(tmp_path)) == {}
