"""Runs that end early and are taken up again: by the same layout bit for bit, by any other to rounding."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from launching import Torchrun
from safetensors.torch import load_file
from training_runs import JOB, MLP, TRANSFORMER
from training_runs import train as train_and_evaluate_all

from service.jobs.files import DataLayout
from service.models import WeightsError
from service.models.reference import trained
from service.parallel import checkpoint
from service.training.checkpoints import newest_checkpoint

STEPS, STOP = 6, 3
SPEC = {**TRANSFORMER, "steps": STEPS, "evaluate": {"every": 2}}
OTHERS = [f"job_{letter * 20}" for letter in "uvwxy"]
FSDP, TENSOR, PIPELINE = {"dp_shard": 2}, {"tp": 2}, {"pp": 2}
TOLERANCE = 2e-5  # as in test_layouts


train = partial(train_and_evaluate_all, test_samples=37)


def with_layout(parallel: dict[str, int]) -> dict[str, Any]:
    return {**SPEC, "parallel": parallel}


def goes_on(
    folder: str, job_id: str, parallel: dict[str, int], stop_after: int | None = None, **changes: Any
) -> dict[str, Any]:
    """Another job, which takes up the stopped one's newest checkpoint."""
    spec = {**with_layout(parallel), "resume": {"job": JOB}, **changes}
    return train(folder, spec, job_id=job_id, stop_after=stop_after)


def copy_job(source: str, target: str) -> None:
    """One rank copies, the others wait."""
    if torch.distributed.get_rank() == 0:
        shutil.copytree(source, target)
    torch.distributed.barrier()


def stop_and_resume(folder: str) -> dict[str, Any]:
    """On two ranks: a run without interruption, and one that stops and goes on, also in other layouts."""
    whole = train(f"{folder}/whole", with_layout(FSDP))
    first = train(f"{folder}/stopped", with_layout(FSDP), stop_after=STOP)
    for name in ("tensor", "pipeline", "alone"):
        copy_job(f"{folder}/stopped", f"{folder}/{name}")
    return {
        "whole": whole,
        "first": first,
        "same": train(f"{folder}/stopped", with_layout(FSDP)),
        "tensor": train(f"{folder}/tensor", with_layout(TENSOR)),
        "pipeline": train(f"{folder}/pipeline", with_layout(PIPELINE)),
        "slower": goes_on(f"{folder}/alone", OTHERS[0], FSDP, optimizer={"lr": 1e-30}, steps=STOP + 1),
    }


def go_on_as_others(folder: str) -> dict[str, Any]:
    """On two ranks: other jobs that go on where one was stopped."""
    alone = f"{folder}/alone"
    return {
        "goes on": goes_on(alone, OTHERS[1], FSDP),
        "tensor": goes_on(alone, OTHERS[2], TENSOR),
        "pipeline": goes_on(alone, OTHERS[3], PIPELINE),
        "stopped": goes_on(alone, OTHERS[4], FSDP, stop_after=1),
        "stopped and on": goes_on(alone, OTHERS[4], FSDP),
    }


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory, torchrun: Torchrun) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("resume")
    return folder, torchrun(stop_and_resume, 2, folder=str(folder))[0]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_stopped_run_says_so_and_leaves_a_checkpoint_but_no_model(resumed: tuple[Path, dict[str, Any]]) -> None:
    folder, runs = resumed
    assert runs["first"]["result"]["stopped"] is True
    assert runs["first"]["result"]["completed"] == {"done": STOP, "total": STEPS, "unit": "steps"}
    assert runs["same"]["result"]["completed"] == {"done": STEPS, "total": STEPS, "unit": "steps"}
    assert runs["first"]["steps"] == [1, 2, 3]
    assert "eval_loss" not in runs["first"]["result"]
    left = DataLayout(folder / "alone").job(JOB)
    newest = checkpoint.complete(left.checkpoints)[-1]
    assert newest.step == STOP
    assert not (left.artifacts / "model.safetensors").exists()


@pytest.mark.distributed
def test_the_same_layout_resumes_bit_for_bit(resumed: tuple[Path, dict[str, Any]]) -> None:
    folder, runs = resumed
    assert runs["same"]["steps"] == [4, 5, 6]
    for series in ("loss", "grad_norm"):
        assert runs["first"][series] + runs["same"][series] == runs["whole"][series]
    assert runs["same"]["result"]["eval_loss"] == runs["whole"]["result"]["eval_loss"]
    weights = [DataLayout(folder / name).job(JOB).artifacts / "model.safetensors" for name in ("whole", "stopped")]
    left, right = (load_file(path) for path in weights)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_another_layout_takes_over(resumed: tuple[Path, dict[str, Any]], layout: str) -> None:
    _, runs = resumed
    assert runs[layout]["steps"] == [4, 5, 6]
    for series in ("loss", "grad_norm"):
        assert runs[layout][series] == pytest.approx(runs["whole"][series][STOP:], rel=TOLERANCE, abs=0)


@pytest.mark.slow
@pytest.mark.distributed
def test_another_job_goes_on_where_one_was(resumed: tuple[Path, dict[str, Any]], torchrun: Torchrun) -> None:
    folder, runs = resumed
    others = torchrun(go_on_as_others, 2, folder=str(folder))[0]
    assert others["goes on"]["steps"] == [4, 5, 6]
    assert others["stopped"]["steps"] + others["stopped and on"]["steps"] == [4, 5, 6]
    assert others["goes on"]["result"]["eval_loss"] == runs["whole"]["result"]["eval_loss"]
    for series in ("loss", "grad_norm"):
        whole = runs["whole"][series][STOP:]
        assert others["goes on"][series] == whole
        assert others["stopped"][series] + others["stopped and on"][series] == whole
        for layout in ("tensor", "pipeline"):
            assert others[layout][series] == pytest.approx(whole, rel=TOLERANCE, abs=0)
    assert (DataLayout(folder / "alone").job(OTHERS[2]).artifacts / "model.safetensors").is_file()


@pytest.mark.distributed
def test_a_job_that_goes_on_has_its_own_rate_and_number_of_steps(resumed: tuple[Path, dict[str, Any]]) -> None:
    folder, runs = resumed
    assert runs["slower"]["steps"] == [STOP + 1]
    assert runs["slower"]["loss"] == runs["whole"]["loss"][STOP : STOP + 1]
    layout = DataLayout(folder / "alone")
    _, before = trained(layout.job(JOB), STOP)
    after = load_file(layout.job(OTHERS[0]).artifacts / "model.safetensors")
    for name, tensor in after.items():
        assert torch.equal(before[name][tuple(slice(0, size) for size in tensor.shape)], tensor), name


def test_a_job_that_is_resumed_must_have_left_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=f"{JOB} has no checkpoint of step 'latest'; there are none"):
        goes_on(str(tmp_path), OTHERS[0], {})


@pytest.mark.distributed
def test_one_process_takes_over_from_two(resumed: tuple[Path, dict[str, Any]]) -> None:
    folder, runs = resumed
    alone = train(folder / "alone", with_layout({}))
    for series in ("loss", "grad_norm"):
        assert alone[series] == pytest.approx(runs["whole"][series][STOP:], rel=TOLERANCE, abs=0)


@pytest.mark.distributed
def test_the_history_has_every_step_of_both_attempts_once(resumed: tuple[Path, dict[str, Any]]) -> None:
    folder, runs = resumed
    rows = pq.read_table(DataLayout(folder / "stopped").job(JOB).artifacts / "metrics.parquet").to_pylist()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in rows] == runs["whole"]["loss"]
    assert [row["step"] for row in rows if row["eval_loss"] is not None] == [2, 4, 6]


def test_a_finished_job_that_runs_again_only_publishes(tmp_path: Path) -> None:
    spec = {**MLP, "steps": 3}
    first = train(tmp_path, spec)
    weights = DataLayout(tmp_path).job(JOB).artifacts / "model.safetensors"
    weights.unlink()
    again = train(tmp_path, spec)
    assert again["steps"] == []
    assert again["result"]["eval_loss"] == first["result"]["eval_loss"]
    assert again["result"]["loss"] == first["result"]["loss"]
    assert weights.is_file()


def test_asked_to_stop_in_the_last_step_is_finished(tmp_path: Path) -> None:
    assert train(tmp_path, {**MLP, "steps": 2}, stop_after=2)["result"]["stopped"] is False


def test_other_data_than_the_checkpoint_saw_is_refused(tmp_path: Path) -> None:
    spec = {**MLP, "steps": 4, "model": {**MLP["model"], "in_features": 32}, "data": {"source": "synthetic"}}
    train(tmp_path, spec, stop_after=2)
    with pytest.raises(ValueError, match=r"step_2 was trained on data [0-9a-f]{64}, but here it is"):
        train(tmp_path, {**spec, "data": {"source": "synthetic", "samples": 500}})


@pytest.mark.slow
def test_continuing_from_another_job_starts_where_it_ended(tmp_path: Path) -> None:
    other = "job_" + "o" * 20
    ended = train(tmp_path, {**MLP, "steps": 20}, job_id=other)
    config, weights = trained(DataLayout(tmp_path).job(other), "latest")
    assert config.family == "mlp"
    assert weights["head.weight"].shape == (10, 32)
    frozen = {**MLP, "model": {"job": other}, "steps": 1, "optimizer": {"lr": 1e-30}}
    started = train(tmp_path, frozen)
    assert started["result"]["eval_loss"] == pytest.approx(ended["result"]["eval_loss"], rel=1e-6)


def test_no_checkpoint_at_all_starts_at_the_beginning(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "absent") is None
