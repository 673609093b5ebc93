"""A model is checked under the objective that the job names, and the gate holds for trainings under it alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from service.compilation.program.model import ModelProgram
from service.compilation.program.target import target_of
from service.jobs.files import DataLayout
from service.jobs.plugins import ObjectiveConfig, ObjectiveKind
from service.jobs.runtime import NullReporter, RunContext
from service.jobs.spec.compile import CompileSpec
from service.jobs.spec.objective import OBJECTIVES, CrossEntropy
from service.models.parallelize import ModelRecipe, gate_fingerprints
from service.models.registry import outline
from service.objectives import Objective, ObjectiveContext

CPU = torch.device("cpu")
MLP = {"family": "mlp", "in_features": 64, "hidden": [16], "out_features": 10}


class HingeConfig(ObjectiveConfig):
    name: Literal["hinge"] = "hinge"
    margin: float = 0.5


class Hinge(Objective):
    measures = 1

    def __init__(self, margin: float) -> None:
        self.margin = margin

    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.multi_margin_loss(outputs, targets, margin=self.margin)

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.mean(outputs, targets)[None].double()

    def summary(self, totals: Tensor, samples: int) -> dict[str, float]:
        return {"eval_hinge": totals.item()}


def hinge(config: HingeConfig, context: ObjectiveContext) -> Objective:
    return Hinge(config.margin)


def test_the_objective_of_the_job_is_what_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = ObjectiveKind(HingeConfig, f"{__name__}:hinge")
    known: Any = OBJECTIVES.provided
    monkeypatch.setitem(known, "hinge", replace(known["cross_entropy"], declaration=kind))
    context = RunContext("job_" + "1" * 20, 1, 0, 0, 1, "cpu", DataLayout(tmp_path), NullReporter(), bool)
    spec = CompileSpec.model_validate({"model": MLP, "shapes": [8]}).model_copy(update={"objective": HingeConfig()})
    target = target_of(spec, context, CPU)
    assert isinstance(target.program, ModelProgram)
    outputs, targets = torch.randn(8, 10), torch.arange(8)
    expected = functional.multi_margin_loss(outputs, targets, margin=0.5)
    assert target.program.loss(outputs, targets) == expected
    assert target.subject.about["objective"] == {"name": "hinge", "margin": 0.5}
    assert spec.model is not None
    recipe = ModelRecipe.from_spec(spec)
    for objective, same in ((HingeConfig(), True), (HingeConfig(margin=1), False), (CrossEntropy(), False)):
        (own,) = gate_fingerprints(outline(spec.model), recipe, objective, CPU)  # type: ignore[arg-type]
        assert (own == target.subject.fingerprint) == same
