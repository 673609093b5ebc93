"""Objectives of a package: an evaluation follows from the step, and what checkpoints would lose is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor, nn, ones
from training_runs import MLP, train

from service.objectives import Objective, base, cross_entropy

SPEC: dict[str, Any] = {**MLP, "steps": 3, "checkpoint": {"every": 2}, "evaluate": {"every": 2}}


class Own(Objective):
    """Cross entropy of logits times ``scale``."""

    measures = 3
    scale: Any = 1.0
    plain = cross_entropy.ClassCrossEntropy()

    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.plain.mean(outputs * self.scale, targets)

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.plain.totals(outputs * self.scale, targets)

    def summary(self, totals: Tensor, samples: int) -> dict[str, float]:
        return self.plain.summary(totals, samples)


def run(make: Callable[[], Objective], folder: Path, **more: Any) -> dict[str, Any]:
    with patch.object(base, "OBJECTIVES", SimpleNamespace(function=lambda name: lambda config, context: make())):
        return train(folder, SPEC, test_samples=8, **more)


class Sharpening(Own):
    def begin(self, step: int) -> None:
        self.scale = 1.0 + step


def test_a_resumed_run_evaluates_as_the_one_that_went_on(tmp_path: Path) -> None:
    whole = run(Sharpening, tmp_path / "whole")
    run(Sharpening, tmp_path / "parts", stop_after=2)
    assert run(Sharpening, tmp_path / "parts")["eval_loss"] == whole["eval_loss"]


class Counting(Own):
    count = 0

    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.count += 1
        return super().mean(outputs, targets) / self.count


class Learning(Own):
    def __init__(self) -> None:
        self.scale = nn.Parameter(ones(()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Counting, "'count' of Counting is a number that mean changes, which checkpoints do not hold"),
        (Learning, "the parameter 'scale' of Learning has a gradient, and no optimizer updates what an objective"),
    ],
)
def test_what_an_objective_would_lose_is_named(tmp_path: Path, make: Callable[[], Objective], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(make, tmp_path)
