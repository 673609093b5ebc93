"""Checkpoints in the background: what is saved is the moment of the call, and no failure is silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import full_disk
from lanes import slow_but_for
from launching import Torchrun
from training_runs import JOB, MLP, train

from service.jobs.files import DataLayout
from service.parallel import checkpoint
from service.parallel.checkpoint import BackgroundSaver, CheckpointError, DirectSaver, PublishError, saver, storage


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writes wait for this event before they start."""
    opened, write = threading.Event(), storage.save

    def gated(*arguments: Any, **named: Any) -> Any:
        assert opened.wait(300)
        return write(*arguments, **named)

    monkeypatch.setattr(saver, "save", gated)
    yield opened
    opened.set()


def background(folder: Path, keep: int = 2) -> BackgroundSaver:
    return BackgroundSaver(folder, keep)


def steps(folder: Path) -> list[int]:
    return [found.step for found in checkpoint.complete(folder)]


def test_training_goes_on_while_the_moment_of_the_call_is_written(tmp_path: Path, gate: threading.Event) -> None:
    state = {"weight": torch.arange(6.0)}
    with background(tmp_path) as saving:
        saving.save(1, state, {"loss": 0.5})
        state["weight"].mul_(-1)
        assert not saving.has_failed
        assert not steps(tmp_path)
        gate.set()
    saved = checkpoint.require(tmp_path / "step_1")
    assert saved.meta["loss"] == 0.5
    assert torch.equal(checkpoint.load_whole(saved.path)["weight"], torch.arange(6.0))


def test_one_write_at_a_time(tmp_path: Path, gate: threading.Event) -> None:
    with background(tmp_path, keep=3) as saving:
        saving.save(1, {"x": torch.zeros(3)}, {})
        second = threading.Thread(target=saving.save, args=(2, {"x": torch.ones(3)}, {}))
        second.start()
        second.join(0.2)
        assert second.is_alive()
        gate.set()
        second.join()
        assert 1 in steps(tmp_path)
    assert steps(tmp_path) == [1, 2]


def notice_by_saving(saving: BackgroundSaver) -> None:
    saving.save(3, {"x": torch.zeros(3)}, {})


@pytest.mark.parametrize("notice", [BackgroundSaver.wait, notice_by_saving])
def test_a_failed_write_is_an_error_of_the_next_call_and_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notice: Callable[[BackgroundSaver], None]
) -> None:
    saving = background(tmp_path)
    saving.save(1, {"x": torch.zeros(3)}, {})
    saving.wait()
    monkeypatch.setattr(storage, "publish", full_disk)
    saving.save(2, {"x": torch.zeros(3)}, {})
    with pytest.raises(CheckpointError, match=r"No space left on device.*in the background"):
        notice(saving)
    assert steps(tmp_path) == [1]


def test_a_failed_write_is_noticed_at_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = background(tmp_path)
    monkeypatch.setattr(storage, "publish", full_disk)
    saving.save(2, {"x": torch.zeros(3)}, {})
    while not saving.has_failed:
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match="No space left"):
        saving.wait()
    assert not saving.has_failed


def fail_while_saving(saving: BackgroundSaver) -> None:
    with saving:
        saving.save(1, {"x": torch.zeros(3)}, {})
        raise ZeroDivisionError


def test_an_error_elsewhere_does_not_wait_for_long(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "LAST_WRITE_S", 0.05)
    with pytest.raises(ZeroDivisionError):
        fail_while_saving(background(tmp_path))
    assert not gate.is_set()


def test_both_ways_of_saving_leave_the_same_checkpoints(tmp_path: Path) -> None:
    spec = {**MLP, "steps": 3}
    for name, choice in (("background", True), ("direct", False)):
        train(tmp_path / name, {**spec, "checkpoint": {"every": 1, "keep": 2, "async": choice}})
    left, right = (DataLayout(tmp_path / name).job(JOB).checkpoints for name in ("background", "direct"))
    assert steps(left) == steps(right) == [2, 3]
    ours, theirs = (checkpoint.load_whole(folder / "step_3") for folder in (left, right))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_saving_directly_is_done_at_once(tmp_path: Path) -> None:
    with DirectSaver(tmp_path, 1) as saving:
        saving.save(4, {"x": torch.ones(2)}, {})
        assert steps(tmp_path) == [4]


def fail_on_one_rank(folder: str, rank: str, where: str) -> str:
    """On two ranks: the error that each ends with when the disk of one is full from step 4 on."""
    import os

    from service.training.history import History

    write = saver.save

    def failing(target: Path, step: int, *rest: Any, **named: Any) -> Any:
        if step == 4 and os.environ["RANK"] == rank:
            if where == "metrics":
                History.write = full_disk  # type: ignore[method-assign]
            else:
                storage._make_anew = os.fsync = full_disk
        return write(target, step, *rest, **named)

    saver.save = failing  # type: ignore[assignment]
    spec = {**MLP, "steps": 6, "parallel": {"dp_shard": 2}, "checkpoint": {"every": 2, "keep": 5}}
    try:
        train(folder, spec)
    except (CheckpointError, PublishError, OSError) as error:
        return str(error)
    return "no error"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("rank", "where"), slow_but_for([("0", "disk"), ("1", "disk"), ("0", "metrics")], ("1", "disk"))
)
def test_a_rank_that_cannot_write_fails_the_job_on_every_rank(
    tmp_path: Path, torchrun: Torchrun, rank: str, where: str
) -> None:
    """Also where only the first rank writes: the metrics."""
    errors = torchrun(fail_on_one_rank, 2, folder=str(tmp_path), rank=rank, where=where)
    assert all("No space left on device" in error for error in errors), errors
    if where == "disk":
        assert steps(DataLayout(tmp_path).job(JOB).checkpoints) == [2]
