"""Runs of a program's inference: over a data source or its own batches, with trained weights, by their own gate."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Torchrun
from pydantic import ValidationError
from safetensors.torch import load_file
from training_runs import JOB, Recording
from walker import WIDTH, Walker, installed, train

from service.jobs.files import DataLayout
from service.jobs.kinds.registry import spec_adapter
from service.jobs.kinds.run import check
from service.jobs.plugins import CheckContext
from service.jobs.runtime import RunContext
from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.run import RunSpec
from service.models import WeightsError
from service.models import program as programs
from service.models.program import Site
from service.parallel import distributed
from service.parallel import mesh as meshes
from service.training.programs import inference, outputs
from service.training.programs.failures import LackingError, ProgramError

RUN, GATE = "job_" + "r" * 20, "job_" + "g" * 20
DATA = {"source": "synthetic", "features": WIDTH, "classes": 2, "samples": 64}


class WalkingRun(RunSpec):
    """As where a package brings the program."""

    program: Walker


def run(
    folder: Path, program: Walker | None = None, *, stop_after: int | None = None, **fields: Any
) -> tuple[dict[str, Any], Recording]:
    distributed.start("cpu")
    report, asked, launch = Recording(), 0, distributed.read_launch(os.environ)

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return stop_after is not None and asked > stop_after

    spec = WalkingRun.model_validate({"program": program or Walker(), **fields})
    place = (launch.rank, launch.local_rank, launch.world_size)
    context = RunContext(RUN, 1, *place, "cpu", DataLayout(folder), report, should_stop)
    with installed():
        return inference.run(spec, context) or {}, report


def found(folder: Path) -> dict[str, torch.Tensor]:
    files = (DataLayout(folder).job(RUN).artifacts / "outputs").glob("*.safetensors")
    return {name: value for file in files for name, value in load_file(file).items()}


def test_it_runs_over_a_source_with_the_weights_of_a_training(tmp_path: Path) -> None:
    """A row for each sample of the test split, though the last batch is filled up; other weights give others."""
    train(tmp_path, steps=3)
    result, report = run(tmp_path, data=DATA, batch=5, weights={"job": JOB})
    rows = torch.cat([found(tmp_path)[f"{step}/found"] for step in range(result["steps"])])
    assert len(rows) % 5, "the last batch is not whole"
    assert result["completed"] == {"done": len(report.series("step_ms")), "total": -(-len(rows) // 5), "unit": "steps"}
    assert f"weights of step 3 of {JOB}" in report.logs[0]
    assert {path.name for path in report.artifacts} == {"outputs"}
    run(tmp_path / "fresh", data=DATA, batch=5)
    assert not torch.equal(found(tmp_path / "fresh")["0/found"], found(tmp_path)["0/found"])


def on_two_ranks(folder: str) -> None:
    run(Path(folder), data=DATA, batch=6, parallel={"dp_replicate": 2})


@pytest.mark.distributed
def test_ranks_share_each_batch(tmp_path: Path, torchrun: Torchrun) -> None:
    run(tmp_path / "alone", data=DATA, batch=6)
    torchrun(on_two_ranks, 2, folder=str(tmp_path / "two"))
    folder = DataLayout(tmp_path / "two").job(RUN).artifacts / "outputs"
    first, second = (load_file(folder / f"{rank}-0.safetensors") for rank in range(2))
    for name, whole in found(tmp_path / "alone").items():
        if name.endswith("found"):
            torch.testing.assert_close(torch.cat((first[name], second[name])), whole)


@pytest.mark.parametrize("fields", [{"steps": 7}, {"data": DATA, "batch": 2}])
def test_a_run_that_was_stopped_goes_on_after_its_last_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(outputs, "STEPS", 2)
    whole, _ = run(tmp_path / "whole", **fields)
    stopped, _ = run(tmp_path, stop_after=5, **fields)
    assert (stopped["steps"], stopped["completed"]["done"]) == (5, 5)
    result, report = run(tmp_path, **fields)
    assert result["steps"] == whole["steps"]
    assert report.metrics[0][0] == 5, "four steps are in whole files"
    assert found(tmp_path).keys() == found(tmp_path / "whole").keys()
    assert all(torch.equal(value, found(tmp_path / "whole")[name]) for name, value in found(tmp_path).items())


def test_a_gate_of_its_own_compiles_it_and_other_calls_go_on_in_eager(tmp_path: Path) -> None:
    with installed():
        site = Site(torch.device("cpu"), meshes.build(ParallelSpec(), "cpu"), 0, DataLayout(tmp_path))
        _, own = programs.make(Walker(), ParallelSpec(), site)
    way = {"phase": "inference", "grad": False, "thread": "MainThread"}
    calls = [
        {"module": "encoder", **way, "shape": "[5, 6]", "per_step": 1.0},
        {"module": "head", **way, "shape": "[5, 6] []", "per_step": 2.0},
    ]
    report = {
        "gate": {"train": None, "inference": "aot_eager", "fingerprint": own},
        "rungs": [{"rung": "aot_eager", "phase": "inference", "invocations": calls}],
    }
    artifacts = DataLayout(tmp_path).job(GATE).artifacts
    artifacts.mkdir(parents=True)
    (artifacts / "report.json").write_text(json.dumps(report))
    choice = {"inference": True, "gate": GATE}
    result, _ = run(tmp_path, steps=3, compile=choice)
    assert (result["compiled"], result["eager"]) == ({"inference": "aot_eager"}, {})
    run(tmp_path / "eager", steps=3)
    torch.testing.assert_close(found(tmp_path), found(tmp_path / "eager"))
    shutil.rmtree(DataLayout(tmp_path).job(RUN).root)
    result, logged = run(tmp_path, data=DATA, batch=4, compile=choice)
    assert "with [4, 6] float32, and the check saw" in result["eager"]["inference"]
    assert any("inference goes on in eager" in line for line in logged.logs)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"program": Walker(reads=False), "data": DATA}, LackingError, "data.source=synthetic: program 'walker' reads"),
        ({"weights": {"job": JOB}, "steps": 1}, WeightsError, "weights.job: job_t+ has no checkpoint of step 'latest'"),
        ({"program": Walker(fault="grows", at=2), "steps": 5}, ProgramError, "step 2: its output 'found'"),
        (
            {"program": Walker(fault="raises", at=2), "steps": 5},
            ProgramError,
            "inference step 2: KeyError: 'no such room'",
        ),
    ],
)
def test_what_it_lacks_or_does_wrong_is_named(
    tmp_path: Path, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(tmp_path, **fields)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "steps"),
        ({"steps": 1, "data": DATA}, "steps"),
        ({"steps": 1, "compile": {"train": True, "gate": GATE}}, "compile.train"),
        ({"data": DATA, "batch": 3, "parallel": {"dp_shard": 2}}, "batch"),
    ],
)
def test_a_spec_that_cannot_end_or_divide_is_refused_by_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        WalkingRun.model_validate({"program": {"name": "walker"}, **fields})
    assert [each["ctx"]["field"] for each in caught.value.errors()] == [field]


def test_its_calls_are_counted(tmp_path: Path) -> None:
    _, report = run(tmp_path, steps=3, counters={"every": 2})
    name = "calls/head/inference/5x6+scalar"
    assert [(step, values[name]) for step, values in report.metrics if name in values] == [(1, 2), (3, 2)]


@pytest.mark.parametrize("spec", [{"kind": "train", "steps": 1}, {"kind": "run", "steps": 1}])
def test_an_exported_module_is_checked_and_nothing_else(spec: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="no installed package brings a program"):
        spec_adapter.validate_python({**spec, "program": {"name": "exported", "file": "file_" + "0" * 64}})


def test_weights_must_be_those_of_the_program() -> None:
    from types import SimpleNamespace

    spec = WalkingRun.model_validate({"program": {"name": "walker"}, "steps": 1, "weights": {"job": JOB}})
    other = SimpleNamespace(id=JOB, kind="train", spec={"model": {"family": "mlp"}})
    (problem,) = check(spec, CheckContext(lookup=lambda _: other))  # type: ignore[arg-type,return-value]
    assert (problem.path, problem.message) == ("weights.job", f"job {JOB} trains a model")
