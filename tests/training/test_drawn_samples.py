"""Samples that are drawn where they are taken, as random crops are: alike whenever and wherever they are taken."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from service.jobs.spec.common import ParallelSpec
from service.models import data
from service.models.data import Split
from service.models.data.sources import OnDisk, Samples
from service.parallel import mesh
from service.training import loop
from service.training.setup import Training

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Noisy(OnDisk):
    """Samples that draw where so many are taken at once."""

    least: int = 1
    sequence = None

    def __len__(self) -> int:
        return 8

    def take(self, indices: Tensor) -> Split:
        return Split(torch.rand(len(indices), 1) if len(indices) >= self.least else torch.zeros(1, 1), indices)


class NoisySplit(Split):
    def take(self, indices: Tensor) -> Split:
        return Noisy().take(indices)


@pytest.mark.parametrize("samples", [Noisy(), Noisy(least=2), NoisySplit(torch.zeros(8, 1), torch.arange(8))])
def test_samples_that_are_drawn_follow_from_seed_and_step(samples: Samples) -> None:
    fed = data.open_feed(samples, data.BatchOrder(3, 8, 4), 0, 1, CPU)
    first = [fed.batch(step).inputs for step in (0, 1)]
    torch.manual_seed(5)  # as a step does
    assert torch.equal(fed.batch(1).inputs, first[1])
    assert not torch.equal(*first)


def evaluated(rank: int, step: int) -> list[float]:
    """Return what a rank draws in an evaluation after a step."""
    training = MagicMock(mesh=mesh.plan(ParallelSpec(pp=2, dp_shard=2), rank), device=CPU)
    training.order.global_batch = 4
    training.spec.seed, training.spec.evaluate.samples, training.objective.measures = 0, None, 1
    training.dataset.test, training.engine.evaluate.return_value = Noisy(), 0
    Training.seed(training, "step", step)
    loop.evaluate(training)
    return [float(x) for call in training.engine.evaluate.call_args_list for x in call.args[0].inputs]


def test_every_evaluation_draws_the_same_samples_on_all_stages_of_a_pipeline() -> None:
    first, *others = (evaluated(rank, step) for rank, step in ((0, 1), (2, 1), (0, 2), (1, 1)))
    assert len(set(first)) == 4
    assert others[:2] == [first] * 2
    assert not {*first} & {*others[2]}
