"""The example script carried over: by name, as a package's model, and as a package's program."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from launching import ROOT
from training_runs import JOB, Recording

from service.jobs.files import DataLayout
from service.jobs.kinds.registry import spec_adapter
from service.jobs.plugins import CheckContext
from service.jobs.plugins.catalogue import _Provided
from service.jobs.runtime import RunContext
from service.jobs.spec.common import ParallelSpec
from service.jobs.spec.families import FAMILIES
from service.jobs.spec.program import PROGRAMS
from service.jobs.spec.train import TrainSpec
from service.jobs.submission.check import check
from service.parallel import distributed
from service.training import job

FOLDER = ROOT / "examples" / "from_script"
PAGE = ROOT / "docs" / "use" / "from-your-script.md"


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What the package declares, found as if it were installed."""
    monkeypatch.syspath_prepend(FOLDER)
    from digits_resnet import declared

    family, program = (_Provided(each, "digits-resnet", "0.1") for each in (declared.FAMILY, declared.PROGRAM))
    with (
        patch.dict(FAMILIES.provided, {"digits-resnet": family}),
        patch.dict(PROGRAMS.provided, {"digits-loop": program}),
    ):
        yield declared


def run(folder: Path, spec: TrainSpec) -> tuple[dict[str, Any], Recording]:
    distributed.start("cpu")
    report = Recording()
    context = RunContext(JOB, 1, 0, 0, 1, "cpu", DataLayout(folder), report, lambda: False)
    return dict(job.run(spec, context) or {}), report


def read(name: str, **fields: Any) -> tuple[dict[str, Any], TrainSpec]:
    """A spec as it is written, and what is left of it where the package is not installed; on one rank."""
    given = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    stand_in = {"family": "mlp", "in_features": 64, "hidden": [1], "out_features": 10}
    rest = {key: value for key, value in given.items() if key not in {"model", "program", "parallel"}}
    spec = TrainSpec.model_validate({"data": {"source": "digits"}, **rest, "model": stand_in, **fields})
    return given, spec


def test_the_scripts_model_by_name_is_accepted() -> None:
    spec = spec_adapter.validate_python(yaml.safe_load((FOLDER / "by_name.yaml").read_text()))
    assert check(spec, CheckContext({"cpu": 4}, fleet_packages={"timm"})) == []


def test_the_scripts_network_trains_as_a_packages_model(declared: Any, tmp_path: Path) -> None:
    given, spec = read("package", steps=12)
    model = declared.DigitsResnet.model_validate({**given["model"], "width": 4})
    result, report = run(tmp_path, spec.model_copy(update={"model": model}))
    losses = report.series("loss")
    assert result["completed"]["done"] == 12
    assert losses[-1] < 0.8 * losses[0]


def test_the_scripts_loop_trains_as_a_packages_program(declared: Any, tmp_path: Path) -> None:
    given, spec = read("program", steps=12, evaluate={"every": 12}, checkpoint={"every": 12})
    program = declared.DigitsLoop.model_validate({**given["program"], "width": 4})
    result, report = run(tmp_path, spec.model_copy(update={"program": program, "model": None, "data": None}))
    losses = report.series("loss")
    assert spec.parallel == ParallelSpec()
    assert result["completed"]["done"] == 12
    assert losses[-1] < 0.8 * losses[0]
    assert result["eval_accuracy"] > 0.1


@pytest.mark.parametrize(
    "path", [*sorted(FOLDER.glob("*.yaml")), ROOT / "examples" / "script.yaml"], ids=lambda path: path.stem
)
def test_the_page_shows_the_specs_as_they_are(path: Path) -> None:
    assert f"```yaml\n{path.read_text()}```" in PAGE.read_text()
