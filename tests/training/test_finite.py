"""Numbers that are infinite or none end a job in a user's words, and leave no checkpoint that holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Torchrun
from training_runs import JOB, MLP, train

from service.jobs.files import DataLayout
from service.models.data import Split
from service.parallel import checkpoint
from service.training import loop
from service.training.gradients import NonFiniteError, check_weights

SPEC: dict[str, Any] = {**MLP, "steps": 2, "checkpoint": {"every": 1}, "schedule": {"decay": "constant"}}


def steps_left(folder: Path) -> list[int]:
    """The steps of the checkpoints; all weights in them are finite."""
    found = checkpoint.complete(DataLayout(folder).job(JOB).checkpoints)
    for saved in found:
        assert all(bool(tensor.isfinite().all()) for tensor in checkpoint.load_whole(saved.path, "model.").values())
    return [saved.step for saved in found]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            {"lr": 1e38},
            r"the update of step 1 is beyond float32 with a learning rate of 1e\+38; lower .* has no checkpoint",
        ),
        ({"lr": 1e300}, r"the update of step 1 is beyond float32 with a learning rate of 1e\+300"),
    ],
)
def test_an_update_that_breaks_the_weights_leaves_no_checkpoint(
    tmp_path: Path, optimizer: dict[str, Any], message: str
) -> None:
    with pytest.raises(NonFiniteError, match=message):
        train(tmp_path, {**SPEC, "steps": 1, "optimizer": {**MLP["optimizer"], **optimizer}}, test_samples=5)
    assert steps_left(tmp_path) == []


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_weights_are_looked_at_before_they_are_kept(value: float) -> None:
    sound = [torch.tensor([1e38, -1e-45]), torch.empty(0), torch.arange(3)]
    check_weights(sound, 7, torch.device("cpu"))
    with pytest.raises(NonFiniteError, match=r"the weights are not finite on rank 0 after the update of step 7"):
        check_weights([*sound, torch.tensor([[1.0, value]])], 7, torch.device("cpu"))


def test_a_last_update_that_breaks_the_model_does_not_succeed(tmp_path: Path) -> None:
    """The weights are finite, and what they give is not."""
    with pytest.raises(NonFiniteError, match=r"eval_loss is (nan|inf) in the evaluation after step 1"):
        train(tmp_path, {**SPEC, "steps": 1, "optimizer": {"lr": 1e25}}, test_samples=5)


@pytest.mark.parametrize("every", [None, 1])
def test_a_value_of_the_test_split_that_is_no_number_fails_the_job(
    tmp_path: Path, every: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Split.take

    def broken(split: Split, rows: torch.Tensor) -> Split:
        found = take(split, rows)
        found.inputs[0, 0] = torch.nan
        return found

    batches = loop.batches

    def only_in_evaluations(*arguments: Any) -> Any:
        monkeypatch.setattr(Split, "take", broken)
        return batches(*arguments)

    monkeypatch.setattr(loop, "batches", only_in_evaluations)
    step = every or 2
    with pytest.raises(
        NonFiniteError, match=rf"eval_loss is nan in the evaluation after step {step}: look.* last checkpoint"
    ):
        train(tmp_path, {**SPEC, "evaluate": {"every": every}}, test_samples=5)
    assert steps_left(tmp_path)[-1] == step


def break_weights(folder: str) -> str:
    """On two ranks: an update after which the part of the second one is infinite."""
    from service.training.loop import Loop

    update = Loop._update

    def broken(loop: Loop, loss: torch.Tensor, rate: float) -> Any:
        reduction = update(loop, loss, rate)
        if loop.context.rank == 1:
            with torch.no_grad():
                loop.parameters[0].to_local().fill_(torch.inf)  # type: ignore[operator]
        return reduction

    Loop._update = broken  # type: ignore[method-assign]
    try:
        train(folder, {**SPEC, "parallel": {"dp_shard": 2}}, test_samples=5)
    except NonFiniteError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.distributed
def test_weights_that_one_rank_broke_are_refused_by_all(tmp_path: Path, torchrun: Torchrun) -> None:
    messages = torchrun(break_weights, 2, folder=str(tmp_path))
    assert messages[0] == messages[1]
    assert messages[0].startswith("the weights are not finite on rank 1 after the update of step 1")
    assert steps_left(tmp_path) == []
