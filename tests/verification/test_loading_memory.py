"""A rank of a verification job loads its share of the weights, whatever layout saved them; never the whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from test_verify_job import context

from service.jobs.layout import DataLayout
from service.jobs.runtime import RunContext

pytestmark = pytest.mark.distributed

LAYOUTS: list[dict[str, int]] = [{"tp": 2}, {"pp": 2}]
MODEL = {"family": "mlp", "in_features": 64, "hidden": [256] * 8, "out_features": 10}
WHOLE = 4 * (64 * 256 + 7 * 256**2 + 256 * 10 + 8 * 256 + 10)
"""Bytes."""
BOX = {"box": {"lower": [0.0] * 64, "upper": [0.1] * 64}}


def peaks_of_loading(folder: str) -> list[float]:
    """On this rank, as shares of the model: checkpoints that each layout saved, verified on each."""
    from census import peak_allocated

    from service.jobs.spec.train import TrainSpec
    from service.jobs.spec.verify import VerifySpec
    from service.models import initialize
    from service.parallel import distributed
    from service.training import job as training
    from service.verification.making import make

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
                make(spec, ranked, device)

            found.append(peak_allocated(load, data.root) / WHOLE)
    distributed.stop()
    return found


def test_a_checkpoint_of_any_layout_is_never_held_whole(tmp_path: Path, torchrun: Any) -> None:
    for found in torchrun(peaks_of_loading, 2, folder=str(tmp_path)):
        # A half, which stages cannot have to the last layer, and one of eight weights on its way from several files.
        assert max(found) <= 0.7
