"""Checkpoint folders in one process: what counts as complete, what is kept, what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from full_disk import full_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from service.parallel import checkpoint


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.weight": torch.randn(5, 3, generator=generator),
        "model.bias": torch.randn(3, generator=generator).bfloat16(),
        "optimizer.exp_avg.weight": torch.randn(5, 3, generator=generator),
    }


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name]), name


def test_what_was_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path, 7, tensors(), {"model": {"family": "mlp"}})
    assert (saved.step, saved.path, saved.meta["model"]) == (7, tmp_path / "step_7", {"family": "mlp"})
    state = tensors(seed=1)
    assert checkpoint.load(saved.path, state).step == 7
    assert_equal(state, tensors())


def test_whole_tensors_by_prefix(tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path, 0, tensors(), {})
    expected = {"weight": tensors()["model.weight"], "bias": tensors()["model.bias"]}
    assert_equal(checkpoint.load_whole(saved.path, "model."), expected)


def test_no_pickle_is_written(tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path, 1, tensors(), {})
    assert {path.suffix for path in saved.path.iterdir()} == {".json", ".safetensors"}


@settings(max_examples=20, deadline=None)
@given(steps=st.lists(st.integers(0, 10**6), min_size=1, max_size=5, unique=True), keep=st.integers(1, 3))
def test_the_newest_are_kept(tmp_path_factory: pytest.TempPathFactory, steps: list[int], keep: int) -> None:
    folder = tmp_path_factory.mktemp("kept")
    steps = sorted(steps)
    for step in steps:
        checkpoint.save(folder, step, {"x": torch.tensor([step])}, {}, keep)
    assert [found.step for found in checkpoint.complete(folder)] == steps[-keep:]
    newest = checkpoint.complete(folder)[-1]
    assert newest.step == steps[-1]
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"step_{step}" for step in steps[-keep:])


def test_nothing_published_is_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.complete(tmp_path / "absent") == []
    assert checkpoint.complete(tmp_path) == []


def cut_short(path: Path) -> None:
    shard = next(path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])


def drop_a_file(path: Path) -> None:
    next(path.glob("*.safetensors")).unlink()


def drop_meta(path: Path) -> None:
    (path / checkpoint.META).unlink()


def cut_meta(path: Path) -> None:
    (path / checkpoint.META).write_text('{"step": 2, "fil')


def empty_meta(path: Path) -> None:
    (path / checkpoint.META).write_text("[]")


@pytest.mark.parametrize("damage", [cut_short, drop_a_file, drop_meta, cut_meta, empty_meta])
def test_a_damaged_checkpoint_is_passed_over_and_refused(tmp_path: Path, damage: object) -> None:
    checkpoint.save(tmp_path, 1, tensors(), {})
    newer = checkpoint.save(tmp_path, 2, tensors(seed=2), {})
    damage(newer.path)  # type: ignore[operator]
    newest = checkpoint.complete(tmp_path)[-1]
    assert newest.step == 1
    with pytest.raises(ValueError, match=r"step_2 is not a complete checkpoint"):
        checkpoint.load(newer.path, tensors())
    repaired = checkpoint.save(tmp_path, 2, tensors(seed=2), {})
    assert_equal(checkpoint.load_whole(repaired.path), tensors(seed=2))


def test_leftovers_and_foreign_entries_are_ignored(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, tensors(), {})
    (tmp_path / ".unfinished_step_9").mkdir()
    (tmp_path / "step_x").mkdir()
    (tmp_path / "step_5").write_text("a file")
    assert [found.step for found in checkpoint.complete(tmp_path)] == [1]
    checkpoint.save(tmp_path, 2, tensors(), {})
    assert not (tmp_path / ".unfinished_step_9").exists()


@pytest.mark.parametrize(
    ("where", "error"),
    [((os, "fsync"), CheckpointException), ((Path, "write_text"), OSError), ((Path, "rename"), OSError)],
)
def test_a_failing_save_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[object, str], error: type[BaseException]
) -> None:
    checkpoint.save(tmp_path, 1, tensors(), {})
    with monkeypatch.context() as patched:
        patched.setattr(*where, full_disk)
        with pytest.raises(error, match="No space left"):
            checkpoint.save(tmp_path, 2, tensors(seed=2), {})
    (newest,) = checkpoint.complete(tmp_path)
    assert list(tmp_path.iterdir()) == [newest.path]  # a disk that is full has no room for what is left behind
    assert newest.step == 1
    assert_equal(checkpoint.load_whole(newest.path), tensors())


def test_saving_a_published_step_again_leaves_it_alone(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 3, tensors(), {"attempt": 1})
    assert checkpoint.save(tmp_path, 3, tensors(seed=5), {"attempt": 2}).meta["attempt"] == 1
    assert_equal(checkpoint.load_whole(tmp_path / "step_3"), tensors())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"model.weight": torch.zeros(5, 4)}, r"holds 'model.weight' in shape \(5, 3\); this model has it in \(5, 4\)"),
        ({"model.gain": torch.zeros(3)}, "holds no tensor 'model.gain'"),
    ],
)
def test_another_model_is_refused_untouched(tmp_path: Path, other: dict[str, Tensor], message: str) -> None:
    saved = checkpoint.save(tmp_path, 1, tensors(), {})
    bias = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(saved.path, {"model.bias": bias, **other})
    assert not bias.any()
