"""A checkpoint that has changed on disk is never trained from: the one before is taken, and the job says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training_runs import JOB, MLP, train

from service.jobs.files import DataLayout
from service.models import WeightsError
from service.models.reference import trained
from service.parallel import checkpoint

SPEC: dict[str, Any] = {**MLP, "checkpoint": {"every": 2, "keep": 9}, "schedule": {"decay": "constant"}}
OTHER = "job_" + "u" * 20


def flip(path: Path, place: int = -5) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x40
    path.write_bytes(content)


@pytest.fixture
def job(tmp_path: Path) -> DataLayout:
    train(tmp_path, {**SPEC, "steps": 4}, test_samples=8)
    return DataLayout(tmp_path)


def damaged(layout: DataLayout, step: int) -> Path:
    return next((layout.job(JOB).checkpoints / f"step_{step}").glob("*.safetensors"))


def test_the_one_before_is_taken_and_the_job_says_so(job: DataLayout, tmp_path: Path) -> None:
    calm = train(tmp_path / "calm", {**SPEC, "steps": 6}, test_samples=8)
    flip(damaged(job, 4))
    other = train(tmp_path, {**SPEC, "steps": 6, "resume": {"job": JOB}}, job_id=OTHER, test_samples=8)
    own = train(tmp_path, {**SPEC, "steps": 6}, test_samples=8)
    for run in (own, other):
        assert run["steps"] == [3, 4, 5, 6]
        assert run["loss"] == calm["loss"][2:]
        assert any("the checkpoint of step 4 is damaged: shard-00001.safetensors has" in line for line in run["logs"])
    # The job's own is replaced; the other job's is its own matter.
    assert checkpoint.damage(checkpoint.require(job.job(JOB).checkpoints / "step_4")) is None


def test_one_that_is_asked_for_is_refused_by_name(job: DataLayout, tmp_path: Path) -> None:
    flip(damaged(job, 2))
    with pytest.raises(WeightsError, match=r"the checkpoint of step 2 is damaged: shard-00001.safetensors has changed"):
        train(tmp_path, {**SPEC, "steps": 6, "resume": {"job": JOB, "step": 2}}, job_id=OTHER)
    with pytest.raises(WeightsError, match=r"step_2/shard-00001.safetensors has changed .* \(checkpoints: 2, 4\)"):
        trained(job.job(JOB), 2)


def test_a_finished_model_that_has_changed_is_refused(job: DataLayout) -> None:
    trained(job.job(JOB))
    flip(job.job(JOB).artifacts / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model.safetensors has changed since it was written"):
        trained(job.job(JOB))


def test_a_description_that_has_changed_is_no_checkpoint(job: DataLayout, tmp_path: Path) -> None:
    meta = job.job(JOB).checkpoints / "step_4" / checkpoint.META
    text = meta.read_text()
    meta.write_text(text.replace('"loss": ', '"loss": 1'))
    assert [each.step for each in checkpoint.complete(job.job(JOB).checkpoints)] == [2]
    resumed = train(tmp_path, {**SPEC, "steps": 5, "resume": {"job": JOB}}, job_id=OTHER, test_samples=8)
    assert resumed["steps"] == [3, 4, 5]
    assert any("the checkpoint of step 4 is not whole" in line for line in resumed["logs"])
    meta.write_text(text)
    assert [each.step for each in checkpoint.complete(job.job(JOB).checkpoints)] == [2, 4]
