"""Modules that were not written as models."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from service.jobs.plugins import Features, ModelConfig, Samples
from service.jobs.spec.base import ParallelSpec
from service.models import build, registry
from service.models.initialize import Constant, Distribution
from service.models.plain import PlainModel


class Settings(ModelConfig):
    family: Literal["mine"] = "mine"

    @property
    def reads(self) -> Samples:
        return Features(3, 2)


def network(config: Settings, axis: object) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.LayerNorm(4), nn.Linear(4, 2))


def test_it_is_built_with_weights_that_depend_on_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "family_builder", lambda family: network)
    model, same, other = (build(Settings(), seed=seed) for seed in (1, 1, 2))
    x = torch.rand(5, 3)
    assert model(x).shape == (5, 2)
    assert torch.equal(model(x), same(x))
    assert not torch.equal(model(x), other(x))
    weights = model.state_dict()
    assert weights["blocks.0.1.weight"].abs().max() <= 3**-0.5
    assert weights["blocks.0.3.weight"].tolist() == [1.0] * 4
    assert weights["blocks.0.3.bias"].tolist() == [0.0] * 4


def test_it_is_neither_divided_nor_cut() -> None:
    assert [path for path, *_ in Settings().check_parallel(ParallelSpec(tp=2), 1)] == ["parallel.tp"]
    assert [path for path, *_ in Settings().check_parallel(ParallelSpec(pp=2), 2)] == ["parallel.pp"]
    assert Settings().check_parallel(ParallelSpec(dp_shard=2), 1) == []


def test_what_cannot_be_drawn_or_kept_is_named() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x

    class Drawn(Scaled):
        def distribution(self, name: str) -> Distribution:
            return Constant({"scale": 3.0}[name])

    with pytest.raises(ValueError, match=r"nothing says how 'scale' of a Scaled is drawn"):
        PlainModel(Settings(), Scaled()).distribution("blocks.0.scale")
    assert PlainModel(Settings(), Drawn()).distribution("blocks.0.scale") == Constant(3.0)
    with pytest.raises(ValueError, match=r"has a buffer, 'running_mean'"):
        PlainModel(Settings(), nn.BatchNorm1d(2))
