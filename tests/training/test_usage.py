"""How a training uses its model, as metrics of the job."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from torch import Tensor
from training_runs import MLP, TRANSFORMER, Recording, train

from service.jobs.events import LONGEST_WORDS
from service.jobs.spec.train import TrainSpec
from service.objectives.cross_entropy import ClassCrossEntropy
from service.parallel.boundary import CallSite, HeldResult, Origin
from service.training import usage

KEYS = (usage.CALLS, usage.FORWARDS, usage.REENTRIES, usage.OUTLIVING)


def usage_of(folder: Path, spec: dict[str, Any]) -> tuple[list[tuple[int, dict[str, float]]], list[str]]:
    """Return the metrics of usage, with their steps, and the log."""
    report = Recording()
    train(folder, spec, report=report, test_samples=20)
    events = [
        (step, {name: value for name, value in values.items() if name.split("/")[0] in KEYS})
        for step, values in report.metrics
    ]
    return [event for event in events if event[1]], report.logs


def test_calls_forwards_and_reentries_of_an_eager_training(tmp_path: Path) -> None:
    spec = {**MLP, "batch": {"global": 24, "micro": 8}, "steps": 4, "counters": {"every": 2}}
    found, _ = usage_of(tmp_path, spec)
    first = {
        "calls/stage 0/train/8x64": 3,
        "calls/stage 0 blocks/train/8x64": 3,
        "calls/stage 0 blocks/train/8x32": 3,
    }
    assert [step for step, _ in found] == [1, 2, 3, 4, 4]
    values = found[0][1]
    assert first.items() <= values.items()
    assert values["forwards_per_micro_batch/stage 0"] == values["forwards_per_micro_batch/stage 0 blocks"] == 1
    assert values["reentries/stage 0"] == 0
    assert found[1] == (2, {"outliving_results": 0})
    assert found[2] == (3, values)
    assert found[3:] == [(4, {"outliving_results": 0}), (4, {"calls/stage 0/inference/8x64": 3})], "the evaluation"


@pytest.mark.parametrize(("recomputed", "count"), [("none", 0), ("full", 2)])
def test_recomputation_is_reentry(tmp_path: Path, recomputed: str, count: int) -> None:
    spec = {**TRANSFORMER, "steps": 1, "activation_checkpoint": recomputed}
    values = usage_of(tmp_path, spec)[0][0][1]
    assert values["reentries/stage 0 blocks.attention"] == count, "one for each layer"
    assert values["forwards_per_micro_batch/stage 0 blocks.attention"] == 1


def test_results_that_outlive_their_step_are_counted_by_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []
    mean = ClassCrossEntropy.mean

    def keeping(self: Any, output: Tensor, targets: Tensor) -> Tensor:
        kept.append(output)
        return mean(self, output, targets)

    monkeypatch.setattr(ClassCrossEntropy, "mean", keeping)
    spec = {**MLP, "batch": {"global": 24, "micro": 12}, "steps": 3, "counters": {"every": 100}}
    found, logs = usage_of(tmp_path, spec)
    named = {name: value for _, values in found for name, value in values.items() if name.startswith("outliving")}
    assert named.pop("outliving_results") == 2
    ((name, count),) = named.items()
    assert (count, name.startswith("outliving_results/stage 0/kept[…]")) == (2, True), name
    assert "," not in name
    assert len(name) <= LONGEST_WORDS
    assert sum("alive a whole step after its own: a result [12, 10] of stage 0" in line for line in logs) == 1


def forwards_told(folder: str) -> dict[str, float]:
    """The forwards that this rank of a pipeline reports."""
    report, parallel = Recording(), {"pp": 2, "dp_shard": 2}
    train(folder, {**TRANSFORMER, "steps": 1, "parallel": parallel, "pipeline": {"micro_batches": 4}}, report=report)
    told = {name: value for _, values in report.metrics for name, value in values.items()}
    return {
        name: value for name, value in told.items() if name.startswith(f"{usage.FORWARDS}/stage") and "." not in name
    }


@pytest.mark.slow
@pytest.mark.distributed
def test_the_first_rank_of_each_pipeline_stage_counts_it(torchrun: Any, tmp_path: Path) -> None:
    of_ranks = torchrun(forwards_told, 4, folder=str(tmp_path))
    stages = [{f"forwards_per_micro_batch/stage {number}{part}": 1 for part in ("", " blocks")} for number in range(2)]
    assert of_ranks == [stages[0], {}, stages[1], {}]


def test_a_long_search_for_holders_is_followed_by_steps_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def search(watch: usage.StepWatch) -> tuple[HeldResult]:
        nonlocal now
        now += 1
        return (HeldResult(Origin("stage 0", CallSite("loop.py", 1, "step"), 0), (2,), "torch.float32", ("kept",)),)

    monkeypatch.setattr(usage, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(usage.StepWatch, "outliving", search)
    found, _ = usage_of(tmp_path, {**MLP, "steps": 4, "counters": {"every": 1}})
    steps = [step for step, values in found if "reentries/stage 0" in values]
    assert steps == [1, 2], "the first search is in the third step"


def test_without_counters_nothing_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(usage.StepWatch, "over")
    assert usage_of(tmp_path, {**MLP, "steps": 2, "counters": {"every": None}})[0] == []


def test_a_model_with_many_shapes_has_few_metrics() -> None:
    found = usage._limited(usage.Counter({f"calls/stage 0/train/{rows}x4": 1 for rows in range(100)}), usage.CALLS)
    assert (len(found), sum(found.values()), found["calls/others"]) == (41, 100, 60)


@pytest.mark.parametrize("every", [0, -1, 1.5, "often"])
def test_other_distances_than_whole_steps_are_refused_by_name(every: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        TrainSpec.model_validate({**MLP, "steps": 1, "counters": {"every": every}})
    assert [error["loc"] for error in caught.value.errors()] == [("counters", "every")]
