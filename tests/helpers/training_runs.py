"""Runs of the training job without the service, in this process or on a rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import recording_reporter
from benchmarks.recording_reporter import RecordingReporter
from service.jobs.files import DataLayout
from service.jobs.runtime import RunContext
from service.jobs.spec.compile import Phase
from service.jobs.spec.data import DataSpec
from service.jobs.spec.train import TrainSpec
from service.models import data
from service.models.data import Dataset, Split
from service.parallel import distributed
from service.training import job, setup

JOB = "job_" + "t" * 20

MLP: dict[str, Any] = {
    "model": {"family": "mlp", "in_features": 64, "hidden": [32, 32], "out_features": 10},
    "data": {"source": "digits"},
    "batch": {"global": 24},
    "optimizer": {"lr": 1e-2, "weight_decay": 0.1},
}
TRANSFORMER: dict[str, Any] = {
    "model": {"family": "transformer", "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "max_sequence": 32},
    "data": {"source": "tokens", "sequence": 32},
    "batch": {"global": 8},
    "optimizer": {"lr": 3e-3, "weight_decay": 0.1},
}


class Recording(RecordingReporter):
    """Also keeps the names of spans, what was logged and the last progress."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[str] = []
        self.logs: list[str] = []
        self.done = (0, 0, "")

    def span(self, name: str, start: float, end: float, detail: Mapping[str, Any] | None = None) -> None:
        assert start <= end
        self.spans.append(name)

    def log(self, line: str) -> None:
        self.logs.append(line)

    def progress(self, done: int, total: int, unit: str, **finer: Any) -> None:
        self.done = (done, total, unit)


def train(
    folder: str | Path,
    spec: Mapping[str, Any],
    *,
    stop_after: int | None = None,
    ends_early: Callable[[], str | None] = lambda: None,
    job_id: str = JOB,
    report: Recording | None = None,
    test_samples: int | None = None,
    state: torch.dtype = torch.float32,
    compile_modes: Mapping[Phase, str] | None = None,
    gate_artifacts: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run the job on this rank; losses and norms are rank 0's.

    ``stop_after`` asks it to end during that step; ``ends_early`` says why it is to end as a success, once it is;
    ``test_samples`` cuts the test split, which is what takes time.
    ``state`` is the type of parameters and numbers in samples; ``compile_modes`` are used as a gate would allow them.
    """
    torch.set_num_threads(1)
    distributed.start("cpu")
    report = report or Recording()
    rank = int(os.environ.get("RANK", "0"))
    context = RunContext(
        job_id=job_id,
        attempt=1,
        rank=rank,
        local_rank=rank,
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        device_type="cpu",
        data=DataLayout(Path(folder)),
        report=report,
        should_stop=_stopper(stop_after),
        ends_early=ends_early,
        gate_artifacts=gate_artifacts or {},
    )
    with _data(test_samples, state), _inputs(state, compile_modes or {}):
        result = job.run(TrainSpec.model_validate(spec), context)
    return {
        "result": result,
        "steps": [step for step, values in report.metrics if "loss" in values],
        "loss": list(report.series("loss")),
        "grad_norm": list(report.series("grad_norm")),
        "eval_loss": list(report.series("eval_loss")),
        "bubble_fraction": list(report.series("bubble_fraction")),
        "logs": report.logs,
    }


@contextmanager
def _data(samples: int | None, state: torch.dtype) -> Iterator[None]:
    load = data.load

    def load_less(spec: DataSpec, layout: DataLayout) -> Dataset:
        whole = load(spec, layout)
        test = whole.test.take(torch.arange(len(whole.test))[:samples])
        train, test = (_in_type(split, state) for split in (whole.train, test))
        return replace(whole, train=train, test=test)

    with patch.object(data, "load", load_less):
        yield


def _in_type(split: Any, state: torch.dtype) -> Any:
    if not isinstance(split, Split) or not split.inputs.is_floating_point():
        return split
    return replace(split, inputs=split.inputs.to(state))


@contextmanager
def _inputs(state: torch.dtype, compile_modes: Mapping[Phase, str]) -> Iterator[None]:
    load_inputs = setup.load_inputs

    def load(*arguments: Any) -> setup.TrainingInputs:
        inputs = load_inputs(*arguments)
        return replace(inputs, compile_modes={**inputs.compile_modes, **compile_modes}, state=state)

    with patch.object(setup, "load_inputs", load):
        yield


def _stopper(after: int | None) -> Callable[[], bool]:
    """The job asks once in each step."""
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return after is not None and asked >= after

    return should_stop


def upload(folder: Path, content: bytes) -> str:
    """Put ``content`` where uploads lie and return the id of the file."""
    return recording_reporter.upload(DataLayout(folder), content)
