"""Verification jobs for tests: their specifications, contexts and reports, and a small trained model."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.recording_reporter import RecordingReporter
from service.jobs.files import DataLayout
from service.jobs.runtime import RunContext
from service.jobs.spec.model import MlpConfig
from service.jobs.spec.verify import RobustnessProperty, VerifySpec
from service.models import build, load_into
from service.models.data import load

TRAINED = "job_" + "0" * 20


CONFIG = MlpConfig(in_features=64, hidden=(32, 16, 32), out_features=10)


JOBS = count(1)


def specification(**fields: Any) -> VerifySpec:
    digits = {"data": {"source": "digits"}, "count": 30, "eps": 0.01}
    given = {"kind": "verify", "model": {"job": TRAINED}, "property": {"robustness": digits}, "budget": {"batch": 8}}
    return VerifySpec.model_validate(given | fields)


class Recorder(RecordingReporter):
    """Also keeps the progress."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, int, str]] = []
        self.within: list[dict[str, Any]] = []
        """The share, phase and time left of each report that has them."""
        self.lines: list[str] = []

    def log(self, line: str) -> None:
        self.lines.append(line)

    def progress(self, done: int, total: int, unit: str, **finer: Any) -> None:
        if finer.get("share") is None:
            self.steps.append((done, total, unit))
        else:
            self.within.append(finer)


def context(
    data: DataLayout,
    rank: int = 0,
    world: int = 1,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    job_id: str = "",
    attempt: int = 1,
) -> tuple[RunContext, Recorder]:
    """Of a new job, unless ``job_id`` names one."""
    report = Recorder()
    name = job_id or f"job_{next(JOBS):020}"
    return RunContext(name, attempt, rank, rank, world, "cpu", data, report, should_stop), report


def train(data: DataLayout) -> None:
    """A short training run, and the artifacts that a training job leaves."""
    model = build(CONFIG, seed=1)
    samples = load(specification().property.robustness.data).train  # type: ignore[union-attr]
    digits = samples.take(torch.arange(len(samples)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(digits.inputs), digits.targets).backward()
        optimizer.step()
    folder = data.job(TRAINED).artifacts
    folder.mkdir(parents=True)
    save_file({name: tensor.detach() for name, tensor in model.named_parameters()}, folder / "model.safetensors")
    description = {"config": CONFIG.model_dump(mode="json"), "step": 60, "parallel": {}}
    (folder / "model.json").write_text(json.dumps(description))


def trained_model(data: DataLayout) -> nn.Module:
    from service.models.reference import trained

    config, state = trained(data.job(TRAINED))
    model = build(config)
    load_into(model, state)
    return model


def robustness(count: int = 5, eps: float = 0.01, **data: Any) -> RobustnessProperty:
    return RobustnessProperty.model_validate(
        {"robustness": {"data": {"source": "digits", **data}, "count": count, "eps": eps}}
    )
