"""Weights of a model that is built many times."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from service.models import KeptWeights, load_into

CPU = torch.device("cpu")


@dataclass
class Counted:
    """Counts how often its tensor is read."""

    tensor: Tensor
    reads: list[tuple[slice, ...]] = field(default_factory=list)

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        self.reads.append(part)
        return self.tensor[part]


def test_parts_are_read_once_as_far_as_there_is_room() -> None:
    weights = {"weight": Counted(torch.ones(3, 4)), "bias": Counted(torch.ones(3))}
    kept = KeptWeights(weights, CPU, room=weights["weight"].tensor.nbytes)
    for _ in range(3):
        layer = nn.Linear(4, 3)
        load_into(layer, kept)
        assert all(bool((each == 1).all()) for each in layer.parameters())
        with torch.no_grad():
            layer.weight.fill_(2)  # which the kept part does not share
    assert {name: len(each.reads) for name, each in weights.items()} == {"weight": 1, "bias": 3}
