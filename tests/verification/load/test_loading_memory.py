"""A rank of a verification job loads its share of the weights, whatever layout saved them; never the whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from onnx_models import dense
from verify_jobs import context

from benchmarks.recording_reporter import upload
from service.jobs.files import DataLayout
from service.jobs.runtime import RunContext

pytestmark = pytest.mark.distributed

LAYOUTS: list[dict[str, int]] = [{"tp": 2}, {"pp": 2}]
MODEL = {"family": "mlp", "in_features": 64, "hidden": [256] * 8, "out_features": 10}
WHOLE = 4 * (64 * 256 + 7 * 256**2 + 256 * 10 + 8 * 256 + 10)
"""Bytes."""
BOX = {"box": {"lower": [0.0] * 64, "upper": [0.1] * 64}}


def peaks_of_loading(folder: str) -> list[float]:
    """On this rank, as shares of the model: checkpoints that each layout saved, verified on each."""
    from peak_storage import peak_allocated

    from service.jobs.spec.train import TrainSpec
    from service.jobs.spec.verify import VerifySpec
    from service.models import initialize
    from service.parallel import distributed
    from service.training import job as training
    from service.verification.load import load_tasks

    data, initialize.AT_ONCE = DataLayout(Path(folder)), 2**12
    device = distributed.start("cpu")
    found = []
    for index, layout in enumerate(LAYOUTS):
        trained = f"job_{index:t>20}"
        ranked, _ = context(data, int(os.environ["RANK"]), 2, should_stop=lambda: True, job_id=trained)
        given = {"model": MODEL, "data": {"source": "digits"}, "steps": 9, "batch": {"global": 8}, "parallel": layout}
        training.run(TrainSpec.model_validate(given), ranked)
        for parallel in LAYOUTS:
            asked = {"model": {"job": trained}, "property": BOX, "parallel": parallel}
            spec = VerifySpec.model_validate(asked)

            def load(spec: VerifySpec = spec, ranked: RunContext = ranked) -> None:
                load_tasks(spec, ranked, device)

            found.append(peak_allocated(load, data.root) / WHOLE)
    distributed.stop()
    return found


@pytest.mark.slow
def test_a_checkpoint_of_any_layout_is_never_held_whole(tmp_path: Path, torchrun: Any) -> None:
    for found in torchrun(peaks_of_loading, 2, folder=str(tmp_path)):
        # A half, which stages cannot have to the last layer, and one of eight weights on its way from several files.
        assert max(found) <= 0.7


def peaks_of_onnx(folder: str, file: str, whole: int) -> list[float]:
    """On this rank, as shares of the model in its bounds' type: on two layouts, rigorous on stages."""
    from peak_storage import peak_allocated

    from service.jobs.spec.verify import VerifySpec
    from service.parallel import distributed
    from service.verification.load import load_tasks

    data, device = DataLayout(Path(folder)), distributed.start("cpu")
    found = []
    for parallel, rigorous in ((LAYOUTS[0], False), (LAYOUTS[1], True)):
        ranked, _ = context(data, int(os.environ["RANK"]), 2)
        asked = {"model": {"onnx": file}, "property": BOX, "parallel": parallel, "rigorous": rigorous}
        spec = VerifySpec.model_validate(asked)

        def load(spec: VerifySpec = spec, ranked: RunContext = ranked) -> None:
            load_tasks(spec, ranked, device)

        found.append(peak_allocated(load, data.root) / (2 * whole if rigorous else whole))
    distributed.stop()
    return found


@pytest.mark.slow
def test_constants_of_other_ranks_are_never_made_tensors(tmp_path: Path, torchrun: Any) -> None:
    """Of an ONNX model: what a stage has stays mapped, and a share is copied from what is mapped."""
    widths = [64, *[256] * 8, 10]
    content = dense(widths)
    file = upload(DataLayout(tmp_path), content)
    for on_tp, on_pp in torchrun(peaks_of_onnx, 2, folder=str(tmp_path), file=file, whole=WHOLE):
        assert on_tp <= 0.6
        assert on_pp <= 0.2
