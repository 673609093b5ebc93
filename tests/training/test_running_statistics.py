"""Batch normalisation: its statistics in every layout, and what a forward changes in checkpoints and results."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from launching import Torchrun
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from training_runs import JOB, train

from service.jobs.files import DataLayout
from service.jobs.spec.train import TrainSpec
from service.models import registry
from service.models.data import BatchOrder, Split, load
from service.parallel.collectives import DisagreementError

SPEC: dict[str, Any] = {
    "model": {"family": "timm", "name": "normalised", "channels": 1, "height": 8, "width": 8, "classes": 10},
    "data": {"source": "digits"},
    "batch": {"global": 24},
    "optimizer": {"lr": 1e-2, "clip_norm": None},
    "schedule": {"decay": "constant"},
    "checkpoint": {"every": 2, "keep": 9},
    "steps": 4,
}
PER_RANK = {"model": {**SPEC["model"], "batch_norm": "per-rank"}}
OTHER = "job_" + "u" * 20
TOLERANCE = 1e-10  # as in test_layouts


class Fused(nn.BatchNorm2d):
    """A normalisation with what follows it, as timm has them."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, momentum=cast(Any, None))
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


class Normalised(nn.Module):
    """Two normalisations, one of pictures and one of vectors without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.first = nn.Conv2d(1, 4, 3, bias=False), Fused(4)
        self.leave, self.second = nn.Linear(144, 10, bias=False), nn.BatchNorm1d(10, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.leave(self.first(self.enter(x.view(-1, 1, 8, 8))).flatten(1)))


class Odd(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Counting(Normalised):
    """Keeps something of its own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.last.copy_(x.double().sum())
        return super().forward(x)


def run(folder: str | Path, make: Any = Normalised, *, job_id: str = JOB, **changes: Any) -> Any:
    with patch.object(registry, "FAMILIES", SimpleNamespace(function=lambda family: lambda config, axis: make())):
        return train(folder, {**SPEC, **changes}, job_id=job_id, test_samples=48, state=torch.float64)


def error_of(folder: str, make: Any, **changes: Any) -> str:
    try:
        run(folder, make, **changes)
    except (ValueError, DisagreementError) as error:
        return str(error)
    return "none"


def run_all(folder: str) -> dict[str, Any]:
    layouts = {"shards": {"parallel": {"dp_shard": 2}}, "replicas": {"parallel": {"dp_replicate": 2}}}
    found = {name: run(f"{folder}/{name}", **layout) for name, layout in layouts.items()}
    sharded = layouts["shards"]
    found["own"] = run(f"{folder}/own", **sharded, **PER_RANK)
    found["again"] = run(f"{folder}/again", **sharded, activation_checkpoint="full")
    found["some again"] = run(f"{folder}/some again", **sharded, activation_checkpoint="selective")
    found["first half"] = run(f"{folder}/resumed", **sharded, **PER_RANK, steps=2)
    found["second half"] = run(f"{folder}/resumed", job_id=OTHER, **sharded, **PER_RANK, resume={"job": JOB})
    found["odd"] = error_of(f"{folder}/odd", lambda: nn.Sequential(nn.Linear(64, 10), Odd(10)), **sharded)
    found["counting"] = error_of(f"{folder}/counting", Counting, **sharded)
    return found


def reference(parts: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, parameters and statistics by plain torch in float64, each of ``parts`` of a batch normalised by itself;
    the running statistics are their mean.
    """
    with patch.object(registry, "FAMILIES", SimpleNamespace(function=lambda family: lambda config, axis: Normalised())):
        own = registry.build(cast(Any, TrainSpec.model_validate(SPEC).model), dtype=torch.float64)
    models = [Normalised().double() for _ in range(parts)]
    for model in models:
        model.load_state_dict({name.removeprefix("blocks.0."): each for name, each in own.state_dict().items()})
    first = models[0]
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    samples, losses = cast(Split, load(TrainSpec.model_validate(SPEC).data).train), []
    for step in range(4):
        batch = samples.take(BatchOrder(0, len(samples), 24).indices(step))
        loss = torch.zeros((), dtype=torch.float64)
        for model, x, y in zip(models, batch.inputs.chunk(parts), batch.targets.chunk(parts), strict=True):
            parameters = dict(first.named_parameters())
            logits = torch.func.functional_call(model, parameters, (x.double(),))
            loss = loss + functional.cross_entropy(logits, y) / parts
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = dict(first.state_dict())
    for name, _ in first.named_buffers():
        state[name] = torch.stack([model.state_dict()[name] for model in models]).double().mean(0)
    return losses, state


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, torchrun: Torchrun) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("statistics")
    alone = {"alone": run(folder / "alone"), "alone again": run(folder / "alone again", activation_checkpoint="full")}
    return folder, torchrun(run_all, 2, folder=str(folder))[0] | alone


def published(folder: Path, job_id: str = JOB) -> dict[str, Tensor]:
    return load_file(DataLayout(folder).job(job_id).artifacts / "model.safetensors")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("alone", 1),
        ("alone again", 1),
        ("shards", 1),
        ("replicas", 1),
        ("again", 1),
        ("some again", 1),
        ("own", 2),
    ],
)
def test_losses_weights_and_statistics_are_those_of_plain_torch(
    runs: tuple[Path, dict[str, Any]], name: str, parts: int
) -> None:
    folder, found = runs
    losses, state = reference(parts)
    assert found[name]["loss"] == pytest.approx(losses, rel=TOLERANCE)
    held = published(folder / name)
    assert set(held) == set(state)  # by the names of the module itself
    for each, value in state.items():
        torch.testing.assert_close(held[each].double(), value.double(), rtol=TOLERANCE, atol=TOLERANCE)
    assert held["first.num_batches_tracked"].item() == 4


@pytest.mark.distributed
def test_a_resumed_run_goes_on_with_the_statistics(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, found = runs
    assert found["first half"]["loss"] + found["second half"]["loss"] == found["own"]["loss"]
    assert found["second half"]["eval_loss"] == found["own"]["eval_loss"]
    once, twice = published(folder / "own"), published(folder / "resumed", OTHER)
    assert all(torch.equal(once[name], twice[name]) for name in once)


@pytest.mark.distributed
def test_what_cannot_be_equal_on_all_ranks_is_named(runs: tuple[Path, dict[str, Any]]) -> None:
    _, found = runs
    assert "'blocks.0.1' is a Odd, whose statistics cannot be taken over data-parallel ranks" in found["odd"]
    assert "the ranks disagree on the buffer 'blocks.0.last'" in found["counting"]


def test_statistics_of_a_batch_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'blocks.0.1' keeps no running statistics"):
        run(tmp_path, lambda: nn.Sequential(nn.Linear(64, 10), nn.BatchNorm1d(10, track_running_stats=False)))


def test_no_box_holds_the_statistics_of_a_batch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"objective certified: 'blocks.0.first' normalises by the other samples"):
        run(tmp_path, objective={"name": "certified", "eps": 0.1})


def test_a_trained_model_starts_another_with_its_statistics(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, job_id=OTHER, model={"job": JOB}, optimizer={"lr": 1e-30}, steps=1)
    assert published(tmp_path, OTHER)["first.num_batches_tracked"].item() == 5
