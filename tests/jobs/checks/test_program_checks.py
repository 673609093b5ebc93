"""Specs that train a program: what they may say beside it, and whether a gate is its own."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import ValidationError

from service.jobs.checks import gate
from service.jobs.plugins import CheckContext, ProgramConfig, Reason
from service.jobs.records import Problem
from service.jobs.spec.compile import CompileSpec
from service.jobs.spec.train import TrainSpec
from service.jobs.submission.check import check
from service.jobs.submission.plan import plan

MODEL = {"family": "mlp", "in_features": 64, "hidden": [8], "out_features": 10}
GATE = "job_" + "g" * 20


class Walker(ProgramConfig):
    name: Literal["walker"] = "walker"
    calls: int = 2

    def check(self, spec: Any) -> list[Reason]:
        return [("parallel", "it walks alone", spec.parallel.world_size, "1")] if spec.parallel.world_size > 1 else []


class WithWalker(TrainSpec):
    """As where a package brings the program."""

    program: Walker | None = None


def train(**fields: Any) -> WithWalker:
    return WithWalker.model_validate({"program": {"name": "walker"}, "steps": 4, **fields})


def refused(error: ValidationError) -> list[str]:
    named = (
        (*each["loc"], *([each["ctx"]["field"]] if "field" in each.get("ctx", {}) else [])) for each in error.errors()
    )
    return [".".join(map(str, path)) for path in named]


@pytest.mark.parametrize(
    ("fields", "paths"),
    [
        ({"optimizer": {"lr": 1.0}}, ["optimizer"]),
        ({"model": MODEL}, ["model"]),
        ({"data": {"source": "digits"}}, ["data"]),
        ({"batch": {"global": 8}}, ["batch"]),
        ({"precision": {"param": "bf16"}}, ["precision"]),
        ({"evaluate": {"every": 2, "samples": 3}}, ["evaluate.samples"]),
        ({"export": {"huggingface": "bf16"}}, ["export.huggingface"]),
        ({"program": {"name": "walker", "call": 3}}, ["program.call"]),
        ({"program": None}, ["model", "data"]),
    ],
)
def test_what_describes_a_model_is_refused_beside_a_program(fields: dict[str, Any], paths: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        train(**fields)
    assert refused(caught.value) == paths


def test_a_program_that_is_not_installed_is_the_only_problem() -> None:
    with pytest.raises(ValidationError, match="no installed package brings a program") as caught:
        TrainSpec.model_validate({"program": "walker", "steps": 1})
    assert refused(caught.value) == ["program"]


def test_a_spec_is_read_as_it_was_written() -> None:
    spec = train(checkpoint={"every": 2})
    assert WithWalker.model_validate_json(spec.model_dump_json(by_alias=True)) == spec
    whole = TrainSpec.model_validate({"model": MODEL, "data": {"source": "digits"}, "steps": 1})
    assert "program" not in whole.model_dump(), "an older worker does not know it"
    assert plan(train(parallel={"pp": 2})) is None


def test_the_program_is_asked_at_submit() -> None:
    assert [each.path for each in check(train(parallel={"dp_shard": 2}), CheckContext())] == ["parallel"]
    assert check(train(), CheckContext()) == []


@pytest.mark.parametrize(
    ("checked", "phases", "expected"),
    [
        (Walker(), ["train", "inference"], []),
        (Walker(calls=3), ["train", "inference"], [("program.calls", "the gate's job ran with 3, and this one has 2")]),
        (None, ["train", "inference"], [("compile.gate", "it checks a model")]),
        (Walker(), ["inference"], [("compile.train", "the gate's job checks inference only")]),
    ],
)
def test_the_gate_must_be_that_of_the_program(
    monkeypatch: pytest.MonkeyPatch, checked: Walker | None, phases: list[str], expected: list[tuple[str, str]]
) -> None:
    of_model = CompileSpec.model_validate({"model": MODEL, "phases": phases})
    of_check = of_model.model_copy(update={"program": checked, "model": None}) if checked else of_model
    monkeypatch.setattr(gate, "_spec_of", lambda *_: of_check)
    found: list[Problem] = list(gate.check_gate(train(compile={"train": True, "gate": GATE}), None, CheckContext()))
    assert [(each.path, each.message) for each in found] == expected
