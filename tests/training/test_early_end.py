"""A training that ends by its evaluations, or follows them: exactly, however often it was interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_runs import JOB, MLP, Recording, train

from service.training import loop

LOSSES = {2: 1.0, 4: 0.9, 6: 0.95, 8: 0.93, 10: 0.8, 12: 0.7, 14: 0.6}
SPEC: dict[str, Any] = {
    **MLP,
    "steps": 14,
    "evaluate": {"every": 2},
    "checkpoint": {"every": 3, "async": False},
    "schedule": {"decay": "plateau", "gamma": 0.5, "patience": 0},
    "stop": {"when": {"eval_loss": {"patience": 2}}},
}
OTHER = "job_" + "u" * 20


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations have the losses above."""
    evaluate, at = loop.Loop.evaluate, [0]

    def noted(self: loop.Loop) -> None:
        at[0] = self.step
        evaluate(self)

    monkeypatch.setattr(loop.Loop, "evaluate", noted)
    monkeypatch.setattr(loop, "evaluate", lambda training: {"eval_loss": LOSSES[at[0]]})


def run(folder: Path, **fields: Any) -> tuple[dict[str, Any], list[float]]:
    """What the training found, and the rate of each step."""
    report = Recording()
    found = train(folder, {**SPEC, **fields.pop("changes", {})}, test_samples=5, report=report, **fields)
    return found, list(report.series("lr"))


def test_it_ends_after_the_evaluation_that_decides_and_is_complete(tmp_path: Path) -> None:
    found, rates = run(tmp_path)
    result = found["result"]
    assert (result["steps"], result["eval_loss"], result["stopped"]) == (8, 0.93, False)
    assert result["completed"] == {"done": 8, "total": 8, "unit": "steps"}
    assert result["ended_early"] == "eval_loss is no better than 0.9 after 2 more evaluations"
    assert found["eval_loss"] == [1.0, 0.9, 0.95, 0.93]
    assert any("no better than 0.9" in line for line in found["logs"])
    assert rates == [0.01] * 6 + [0.005] * 2


@pytest.mark.parametrize("stop_after", [5, 6, 7, 8])
def test_an_interruption_changes_nothing(tmp_path: Path, stop_after: int) -> None:
    """At 6 a checkpoint is taken before the evaluation, at 8 the attempt ends before the one that decides."""
    whole, rates = run(tmp_path / "whole")
    first, of_first = run(tmp_path / "stopped", stop_after=stop_after)
    second, of_second = run(tmp_path / "stopped")
    assert first["result"]["stopped"]
    assert of_first + of_second == rates
    assert second["result"].pop("seconds")
    assert whole["result"].pop("seconds")
    assert second["result"] == whole["result"]


def test_another_job_counts_on_from_the_evaluations_of_the_checkpoint(tmp_path: Path) -> None:
    run(tmp_path)
    longer = {"resume": {"job": JOB}, "stop": {"when": {"eval_loss": {"patience": 3}}}}
    found, rates = run(tmp_path, job_id=OTHER, changes=longer)
    assert found["steps"] == list(range(9, 15))
    assert rates[0] == 0.01 * 0.5 * 0.5  # the evaluation of step 8 was no better, too
    again, _ = run(tmp_path, job_id="job_" + "v" * 20, changes={"resume": {"job": JOB}})
    assert (again["steps"], again["result"]["steps"]) == ([], 8)


NO_RULES: dict[str, Any] = {"stop": None, "schedule": {"decay": "constant"}, "evaluate": {"every": 4}}


def told_in(step: int) -> Callable[[], str | None]:
    """The first rank asks in each step, and again for the reason."""
    asked = iter([None] * (step - 1))
    return lambda: next(asked, "told by the sweep")


def test_one_that_its_sweep_stops_is_complete_with_what_it_has(tmp_path: Path) -> None:
    found, _ = run(tmp_path, changes=NO_RULES, ends_early=told_in(6))
    result = found["result"]
    assert (result["steps"], result["stopped"], result["eval_loss"]) == (6, False, 0.95)
    assert result["completed"] == {"done": 6, "total": 6, "unit": "steps"}
    assert result["ended_early"] == "told by the sweep"
    assert (tmp_path / "jobs" / JOB / "artifacts" / "model.safetensors").is_file()


def test_one_that_is_told_in_its_last_step_has_ended_by_itself(tmp_path: Path) -> None:
    found, _ = run(tmp_path, changes=NO_RULES, ends_early=told_in(14))
    assert found["result"]["steps"] == 14
    assert "ended_early" not in found["result"]


def test_a_request_to_stop_comes_first(tmp_path: Path) -> None:
    """The job is to go on elsewhere, and is told again there."""
    found, _ = run(tmp_path, changes=NO_RULES, stop_after=5, ends_early=told_in(5))
    assert found["result"]["stopped"]
    assert found["result"]["completed"] == {"done": 5, "total": 14, "unit": "steps"}
