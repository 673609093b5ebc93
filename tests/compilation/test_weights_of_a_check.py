"""Processes use a job's weights before these are known to be whole; no rung counts unless they are."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.recording_reporter import RecordingReporter
from service import models
from service.compilation import entry, job
from service.compilation.forks import Forks
from service.compilation.selftest import SelfTest
from service.jobs.files import DESCRIPTION, WEIGHTS, DataLayout
from service.jobs.runtime import RunContext
from service.jobs.spec.compile import CompileSpec
from service.jobs.spec.model import MlpConfig
from service.models import WeightsError
from workers.forks import threads


@pytest.mark.parametrize("number", [0.0, math.nan], ids=["that can be used", "that cannot be used"])
def test_weights_that_have_changed_end_the_check_by_name(
    data: DataLayout, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if any(name.startswith("pt_autograd") for name in threads()):  # where PyTorch is built for CUDA, after a backward
        pytest.skip("a backward ran in this process before, so it cannot be forked; this file passes by itself")
    config = {"family": "mlp", "in_features": 4, "hidden": [4], "out_features": 2}
    theirs = data.job("job_" + "2" * 20).artifacts
    theirs.mkdir(parents=True)
    model = models.build(MlpConfig.model_validate(config), seed=1)
    save_file({name: torch.full_like(each, number) for name, each in model.state_dict().items()}, theirs / WEIGHTS)
    (theirs / DESCRIPTION).write_text(json.dumps({"config": config, "step": 1, "sha256": "0" * 64}))
    checked = {"modes": ["eager"], "phases": ["inference"], "shapes": [2], "model": {"job": "job_" + "2" * 20}}
    wanted = CompileSpec.model_validate(checked)
    where = RunContext("job_" + "1" * 20, 1, 0, 0, 1, "cpu", data, RecordingReporter(), lambda: False)
    monkeypatch.setattr(job, "kept_or_run", lambda *_: SelfTest(()))
    processes = Forks.ready(lambda seat: entry._serve(wanted, where, seat), 2, 0)
    try:
        with pytest.raises(WeightsError, match=r"model.safetensors has changed since it was written"):
            job.run(wanted, where, processes)
    finally:
        processes.end()
    assert not (data.job(where.job_id).artifacts / "report.json").exists()
