"""Programs of packages as trainings: they learn, are saved and taken up, obey their gate, and fail by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Torchrun
from pydantic import ValidationError
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from training_runs import JOB, Recording
from walker import ROWS, WIDTH, Walker, installed, spec_of, train

from service.jobs.files import DataLayout
from service.jobs.kinds.train import check
from service.jobs.plugins import CheckContext
from service.jobs.runtime import RefusedError
from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.train import TrainSpec
from service.models import WeightsError
from service.models import program as programs
from service.models.program import Site
from service.parallel import mesh as meshes
from service.parallel.checkpoint import load_whole
from service.training.gate import GateError
from service.training.gradients import NonFiniteError
from service.training.programs import state
from service.training.programs.failures import LackingError, ProgramError

GATE = "job_" + "g" * 20
CPU = torch.device("cpu")


class WalkingTraining(TrainSpec):
    """As where a package brings the program."""

    program: Walker | None = None


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(DataLayout(folder).job(JOB).artifacts / "model.safetensors")


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_it_learns_reports_and_publishes(tmp_path: Path) -> None:
    result, report = train(tmp_path, steps=30, evaluate={"every": 15}, checkpoint={"every": 10})
    assert result is not None
    losses = report.series("loss")
    assert len(losses) == 30
    assert sum(losses[-6:]) < 0.8 * sum(losses[:6])
    assert report.series("twice") == [2 * loss for loss in losses]
    assert result["completed"] == {"done": 30, "total": 30, "unit": "steps"}
    assert (result["program"], result["loss"]) == ("walker", losses[-1])
    assert list(report.series("eval_error")) == [report.series("eval_error")[0], result["eval_error"]]
    assert {name.split(".")[0] for name in weights(tmp_path)} == {"encoder", "head"}
    assert weights(tmp_path)["head.seen"] == 30
    assert {path.name for path in report.artifacts} >= {"model.safetensors", "model.json", "step_30", "metrics.parquet"}
    said = next(line for line in report.logs if line.startswith("program: "))
    assert said == f"program: walker of walking 1.0, {result['parameters']:,} parameters"


def test_draws_between_two_steps_are_told_once(tmp_path: Path) -> None:
    _, report = train(tmp_path, Walker(fault="draws"), steps=4)
    assert sum("draws random numbers before boundary.step_boundary()" in line for line in report.logs) == 1


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_one_that_was_killed_ends_like_one_that_was_not(tmp_path: Path, optimizer: str) -> None:
    """Weights, moments, step counts, buffers, dropout, and what was drawn before the first step: all bit for bit."""
    fields: dict[str, Any] = {"checkpoint": {"every": 2, "async": False}, "evaluate": {"every": 3}}
    program = Walker(optimizer=optimizer)
    whole, through = train(tmp_path / "whole", program, **fields)
    with pytest.raises(SystemExit):
        train(tmp_path / "killed", program, killed_at=6, **fields)
    resumed, rest = train(tmp_path / "killed", program, attempt=2, **fields)
    assert whole is not None
    assert resumed is not None
    assert "resumed from the checkpoint of step 4" in rest.logs
    assert list(rest.series("loss")) == list(through.series("loss"))[4:]
    assert resumed["eval_error"] == whole["eval_error"]
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "killed"))


def on_two_ranks(folder: str) -> dict[str, Any]:
    program, fields = Walker(sharded=True), {"parallel": {"dp_shard": 2}, "checkpoint": {"every": 2}}
    whole = train(f"{folder}/whole", program, **fields)[1]
    first = train(f"{folder}/stopped", program, stop_after=3, **fields)[1]
    rest = train(f"{folder}/stopped", program, attempt=2, **fields)[1]
    with pytest.raises(LackingError) as refused:
        train(f"{folder}/counts", Walker(sharded=True, fault="counts"), **fields)
    found = {"whole": whole, "first": first, "rest": rest}
    return {"refused": str(refused.value), **{name: list(each.series("loss")) for name, each in found.items()}}


@pytest.mark.distributed
def test_shards_of_two_ranks_are_taken_up_bit_for_bit(tmp_path: Path, torchrun: Torchrun) -> None:
    """What ranks hold under one name, and not alike, is refused: a checkpoint would lose all but one."""
    runs = torchrun(on_two_ranks, 2, folder=str(tmp_path))[0]
    assert (len(runs["first"]), len(runs["rest"])) == (3, 3)
    assert runs["first"] + runs["rest"] == runs["whole"]
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "stopped"))
    assert "program 'walker': head.seen differs between ranks; a checkpoint holds" in runs["refused"]


def test_another_job_goes_on_where_one_was_stopped(tmp_path: Path) -> None:
    other = Recording()
    stopped, _ = train(tmp_path, stop_after=4)
    assert stopped is not None
    assert stopped["stopped"] is True
    whole, _ = train(tmp_path / "whole")
    folder = DataLayout(tmp_path)
    folder.job(JOB).root.rename(folder.job(JOB).root.with_name("job_" + "o" * 20))
    result, _ = train(tmp_path, report=other, resume={"job": "job_" + "o" * 20})
    assert whole is not None
    assert result is not None
    assert result["loss"] == whole["loss"]
    assert f"resumed from the checkpoint of step 4 of job job_{'o' * 20}" in other.logs
    with pytest.raises(
        WeightsError, match=r"step 6, made by walking 1.0, does not fit .*: it has 1 optimizers, and here are 2"
    ):
        train(tmp_path, Walker(optimizer="two"), report=other, resume={"job": "job_" + "o" * 20})


def test_a_setting_that_is_built_otherwise_than_before_is_the_new_one(tmp_path: Path) -> None:
    train(tmp_path, stop_after=4)
    _, report = train(tmp_path, Walker(lr=0.0), attempt=2)
    assert "optimizer 0, group 0: lr is 0.0, as built now; it was 0.05" in report.logs
    saved = load_whole(DataLayout(tmp_path).job(JOB).checkpoints / "step_4", "model.")
    assert torch.equal(weights(tmp_path)["encoder.0.weight"], saved["encoder.0.weight"])


@pytest.mark.parametrize(
    ("key", "old", "new", "decides"),
    [
        ("amsgrad", False, True, True),
        ("momentum", 0.0, 0.9, True),
        ("momentum", 0.8, 0.9, False),
        ("lr", 0.05, 0.0, False),
    ],
)
def test_a_setting_that_decides_what_an_optimizer_keeps_stays(key: str, old: Any, new: Any, decides: bool) -> None:
    """Its first step would miss what was not kept before."""
    assert state._decides_form(key, old, new) is decides


def publish_gate(folder: Path, program: Walker, mode: str = "aot_eager", **changes: Any) -> None:
    """The report of a check that saw the program as it is, but for ``changes`` of its calls, and tells no types of a
    head's, as an older one.
    """
    with installed():
        site = Site(CPU, meshes.build(ParallelSpec(), "cpu"), 0, DataLayout(folder))
        _, own = programs.make(program, ParallelSpec(), site)
    rungs = []
    for phase in ("train", "inference"):
        way = {"phase": phase, "grad": phase == "train", "thread": "MainThread"}
        calls = [
            {"module": "encoder", **way, "shape": f"[{ROWS}, {WIDTH}]", "dtype": "float32", "per_step": 1.0},
            {"module": "head", **way, "shape": f"[{ROWS}, {WIDTH}] []", "per_step": 2.0, **changes},
        ]
        rungs.append({"rung": mode, "phase": phase, "invocations": calls})
    gate = {"train": mode, "inference": mode, "fingerprint": own}
    artifacts = DataLayout(folder).job(GATE).artifacts
    artifacts.mkdir(parents=True)
    (artifacts / "report.json").write_text(json.dumps({"gate": gate, "rungs": rungs}))


def compiled(folder: Path, program: Walker, **choice: bool) -> tuple[dict[str, Any], Recording, int]:
    """Train as a gate allows; also return how many graphs were captured."""
    torch._dynamo.reset()
    counters.clear()
    result, report = train(folder, program, compile={**choice, "gate": GATE}, evaluate={"every": 3})
    assert result is not None
    return result, report, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("choice", "graphs"), [({"train": True}, 2), ({"inference": True}, 2), ({"train": True, "inference": True}, 4)]
)
def test_its_gate_opens_the_phases_that_are_asked_for(tmp_path: Path, choice: dict[str, bool], graphs: int) -> None:
    eager, _ = train(tmp_path / "eager", evaluate={"every": 3})
    publish_gate(tmp_path, Walker())
    result, report, captured = compiled(tmp_path, Walker(), **choice)
    assert eager is not None
    assert captured == graphs
    assert result["compiled"] == dict.fromkeys(choice, "aot_eager")
    assert (result["eager"], set(report.series("eager_calls"))) == ({}, {0.0})
    assert result["loss"] == pytest.approx(eager["loss"], rel=1e-6)
    assert result["eval_error"] == pytest.approx(eager["eval_error"], rel=1e-6)


CALLED = "head is called as train, gradients on, in MainThread, with [5, 6] [] float32 float32, and the check saw"


@pytest.mark.parametrize(
    ("program", "seen", "why", "from_step"),
    [
        (Walker(), {"shape": "[7, 6] []"}, f"{CALLED} train,", 1),
        (Walker(), {"dtype": "int64"}, f"{CALLED} train,", 1),
        (Walker(), {"phase": "inference"}, f"{CALLED} infer", 1),
        (Walker(), {"per_step": 1.0}, "head is called 2 times in a step, and in the check 1 times", 1),
        (Walker(), {"per_step": 3.0}, "head is called 2 times in a step, and in the check 3 times", 2),
        (Walker(fault="more calls"), {}, "head is called 3 times in a step, and in the check 2 times", 3),
    ],
)
def test_a_program_that_calls_otherwise_goes_on_in_eager_and_says_so(
    tmp_path: Path, program: Walker, seen: dict[str, Any], why: str, from_step: int
) -> None:
    _, plain = train(tmp_path / "eager", program, evaluate={"every": 3})
    publish_gate(tmp_path, program, **seen)
    result, report, _ = compiled(tmp_path, program, train=True)
    assert result["eager"].keys() == {"train"}
    assert result["eager"]["train"].startswith(why)
    assert [line for line in report.logs if "goes on in eager" in line] == [
        f"rank 0: train goes on in eager: {result['eager']['train']} (gate of {GATE})"
    ]
    assert next(step for step, count in enumerate(report.series("eager_calls"), 1) if count) == from_step
    assert report.series("eager_calls")[-1] == 1 + program.calls
    assert list(report.series("loss")) == pytest.approx(list(plain.series("loss")), rel=1e-5)


def test_a_gate_of_another_configuration_or_without_calls_stays_closed(tmp_path: Path) -> None:
    publish_gate(tmp_path, Walker(calls=3))
    with pytest.raises(GateError, match=r"another configuration: program.calls is 2 here and 3 in the report"):
        compiled(tmp_path, Walker(), train=True)
    report = DataLayout(tmp_path).job(GATE).artifacts / "report.json"
    report.write_text(json.dumps(json.loads(report.read_text()) | {"rungs": []}))
    with pytest.raises(GateError, match=r"compile.train: the report of job_g+ has no calls of the rung aot_eager"):
        compiled(tmp_path, Walker(calls=3), train=True)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raises", "program 'walker', train step 3: KeyError: 'no such room'"),
        ("ends", "program 'walker', train step 3: ValueError: the program's train steps ended"),
        ("no boundary", "program 'walker', train step 3: it does not begin with boundary.step_boundary()"),
        ("no loss", "program 'walker', train step 3: it yields no loss"),
        ("no step", "program 'walker', train step 3: TypeError: the program's train step yields a dict; expected a St"),
        ("no tensor", "program 'walker', train step 3: TypeError: losses['loss'] is a float; expected a tensor"),
        ("no parts", "program 'walker', build(torch.float32): TypeError: build(torch.float32) returns a dict; expect"),
        (
            "shape",
            "program 'walker', train step 3: its output 'found' has shape (2, 6), and had (5, 6) in the steps before",
        ),
        ("other rows", "program 'walker', train step 3: its output 'found' has shape (6, 6), and had (5, 6)"),
    ],
)
def test_a_step_that_goes_wrong_is_named(tmp_path: Path, fault: str, message: str) -> None:
    with pytest.raises(ProgramError, match=re.escape(message)):
        train(tmp_path, Walker(fault=fault))


def test_a_program_that_takes_all_memory_is_named_with_what_it_holds(tmp_path: Path) -> None:
    held = r"after step 1: [\d.]+ GiB, now: [\d.]+ GiB; 1,5\d\d tensors of shape \(3, 3\), torch.float32"
    with pytest.raises(ProgramError, match=r"step 3: OutOfMemoryError: out of memory.* \(in use " + held):
        train(tmp_path, Walker(fault="allocates"))


def test_a_loss_that_is_not_finite_is_named_with_what_can_be_done(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"loss is not finite on rank 0 at step 3; .* fields of program, and go"):
        train(tmp_path, Walker(fault="nan"), checkpoint={"every": 2})


@pytest.mark.parametrize(
    ("program", "fields", "message"),
    [
        ({"evaluates": False}, {"evaluate": {"every": 2}}, "evaluate.every=2: program 'walker' has no evaluation"),
        ({"first": False}, {"checkpoint": {"every": 2}}, "checkpoint.every=2: program 'walker' cannot go on from a st"),
        ({"first": False}, {"preemptible": True}, "preemptible=True: program 'walker' cannot go on from a step"),
        ({"fault": "stateless"}, {"checkpoint": {"every": 2}}, "checkpoint.every=2: program 'walker' has no state"),
        ({"fault": "loose"}, {}, "optimizer 0 (Adam) has a tensor of shape [3] that is in none of the modules encoder"),
        ({"optimizer": "LBFGS"}, {}, "a list: a checkpoint holds tensors and numbers"),
    ],
)
def test_what_it_lacks_is_refused_by_the_field_that_asks_for_it(
    tmp_path: Path, program: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(LackingError, match=re.escape(message)):
        train(tmp_path, Walker(**program), **fields)


@pytest.mark.parametrize("first", [True, False])
def test_it_ends_early_where_its_evaluations_get_no_better(tmp_path: Path, first: bool) -> None:
    stop = {"when": {"eval_error": {"patience": 1, "delta": 1e9}}}
    result, report = train(tmp_path, Walker(first=first), steps=30, evaluate={"every": 2}, stop=stop)
    assert result is not None
    assert result["completed"] == {"done": 4, "total": 4, "unit": "steps"}
    assert "eval_error is no better than" in result["ended_early"]
    assert [step for step, values in report.metrics if "eval_error" in values] == [2, 4]
    assert weights(tmp_path)["head.seen"] == 4


def test_an_end_by_what_it_does_not_measure_is_refused(tmp_path: Path) -> None:
    stop = {"when": {"eval_loss": {"patience": 1}}}
    asked = spec_of(Walker(), stop=stop)
    assert [problem.path for problem in check(asked, CheckContext(lookup=lambda _: None))] == ["evaluate.every"]
    with pytest.raises(RefusedError, match=r"stop follows eval_loss, .* expected one of eval_error"):
        train(tmp_path, evaluate={"every": 2}, stop=stop)


def test_what_the_update_of_a_model_needs_is_refused_beside_a_program() -> None:
    groups = {"groups": [{"match": ["head.*"], "frozen": True}]}
    for field, value in {"optimizer": groups, "schedule": {"decay": "linear"}}.items():
        with pytest.raises(ValidationError) as caught:
            WalkingTraining.model_validate({"program": {"name": "walker"}, "steps": 6, field: value})
        assert [each["ctx"]["field"] for each in caught.value.errors()] == [field]


def test_its_calls_are_counted(tmp_path: Path) -> None:
    _, report = train(tmp_path, steps=3, counters={"every": 5})
    (first,) = [values for step, values in report.metrics if step == 1 and "calls/encoder/train/5x6" in values]
    assert first["calls/encoder/train/5x6"] == 1
    assert first["calls/head/train/5x6+scalar"] == first["forwards_per_micro_batch/head"] == 2
    assert first["reentries/head"] == 0
    assert list(report.series("outliving_results")) == [0]
    assert list(report.series("calls/head/inference/5x6+scalar")) == [4], "the evaluation"


def test_one_that_begins_anew_is_trained_without_checkpoints_on_the_way(tmp_path: Path) -> None:
    stopped, report = train(tmp_path, Walker(first=False), stop_after=3)
    assert stopped is not None
    assert not list(DataLayout(tmp_path).job(JOB).checkpoints.glob("step_*"))
    assert any("it cannot go on from a step" in line for line in report.logs)
    result, report = train(tmp_path, Walker(first=False), attempt=2)
    assert result is not None
    assert len(report.series("loss")) == 6
    assert weights(tmp_path)["head.seen"] == 6
