"""Weights of a model that is built many times."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from service.jobs.spec.model import MlpConfig, TransformerConfig
from service.models import KeptWeights, build, load_into
from service.parallel.tensor.placement import global_tensors

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


@pytest.mark.parametrize(
    "config",
    [
        MlpConfig(in_features=4, hidden=[3], out_features=2),
        TransformerConfig(vocab_size=11, dim=8, layers=1, heads=2, max_sequence=4, tied_embeddings=True),
    ],
    ids=["mlp", "transformer with one matrix for both ends"],
)
def test_what_is_to_be_loaded_is_not_drawn_and_loaded_whole(config: MlpConfig | TransformerConfig) -> None:
    drawn, undrawn = build(config, seed=1), build(config, seed=None)
    assert all(bool(each.isnan().all()) for each in undrawn.parameters())
    load_into(undrawn, dict(global_tensors(drawn)))
    assert undrawn.state_dict().keys() == drawn.state_dict().keys()
    assert all(torch.equal(undrawn.state_dict()[name], each) for name, each in drawn.state_dict().items())
