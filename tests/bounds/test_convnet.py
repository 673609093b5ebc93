"""A convnet is certified like an mlp: alone, and with its channels divided over a tensor-parallel mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launching import Torchrun

CONVNET = {"family": "convnet", "height": 8, "width": 8, "channels": [4, 6], "hidden": [8], "out_features": 10}
METHODS = ("ibp", "crown-ibp", "crown")


def certify(folder: str, tp: int) -> dict[str, Any]:
    """The rows of the job's three methods on this many ranks; those of rank 0."""
    import os

    import torch

    from benchmarks.recording_reporter import RecordingReporter
    from service.jobs.files import DataLayout
    from service.jobs.runtime import RunContext
    from service.jobs.spec.verify import VerifySpec
    from service.verification import job

    torch.set_num_threads(1)
    rank, report = int(os.environ.get("RANK", "0")), RecordingReporter()
    data = DataLayout(Path(folder))
    context = RunContext("job_" + "1" * 20, 1, rank, rank, tp, "cpu", data, report, lambda: False)
    asked = {"robustness": {"data": {"source": "digits"}, "count": 5, "eps": 0.01}}
    found: dict[str, Any] = {}
    for method in METHODS:
        spec = {"kind": "verify", "model": CONVNET, "property": asked, "method": method, "parallel": {"tp": tp}}
        del report.bounds[:]
        job.run(VerifySpec.model_validate(spec), context)
        found[method] = sorted(([row["instance"], row["lower"], row["upper"]] for row in report.bounds), key=str)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return certify(str(tmp_path_factory.mktemp("data")), 1)


@pytest.mark.slow
def test_a_convnet_is_certified_tighter_by_method(alone: dict[str, Any]) -> None:
    widths = {method: sum(sum(high) - sum(low) for _, low, high in rows) for method, rows in alone.items()}
    assert widths["crown"] < widths["crown-ibp"] < widths["ibp"]


@pytest.mark.slow
@pytest.mark.distributed
def test_bounds_are_the_same_on_a_mesh(torchrun: Torchrun, tmp_path: Path, alone: dict[str, Any]) -> None:
    divided = torchrun(certify, 2, folder=str(tmp_path), tp=2)[0]
    for method in METHODS:
        assert len(alone[method]) == 5
        for (one, low, high), (other, other_low, other_high) in zip(alone[method], divided[method], strict=True):
            assert one == other
            assert other_low == pytest.approx(low, rel=1e-4, abs=1e-5)
            assert other_high == pytest.approx(high, rel=1e-4, abs=1e-5)
