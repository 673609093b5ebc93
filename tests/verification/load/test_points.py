"""Inputs at which an imported model is compared with onnxruntime."""

from __future__ import annotations

import pytest
import torch
from onnx_models import model, node
from torch import Tensor, nn

from service.bounds.capture import capture
from service.bounds.onnx import load
from service.jobs.spec.verify import Box
from service.verification.load.model_file import MOST_CONSTANTS, is_small, points
from service.verification.properties.box import OneBox

NEEDLE = model([node("Sub", ["x", "c"], "d"), node("Relu", ["d"])], [2], {"c": torch.tensor([9.0, 19.0]).numpy()})


@pytest.fixture
def asked() -> OneBox:
    return OneBox(Box(lower=[0.0, 10.0], upper=[10.0, 20.0], output=[]), classes=2)


def drawn(asked: OneBox, *, by_pieces: bool) -> Tensor:
    graph = capture(load(NEEDLE), (2,)) if by_pieces else None
    return points(asked, [0], torch.empty(0), graph)


def test_they_are_in_the_box_with_its_ends_and_other_corners(asked: OneBox) -> None:
    found = drawn(asked, by_pieces=False)
    assert ((found >= torch.tensor([0.0, 10.0])) & (found <= torch.tensor([10.0, 20.0]))).all()
    for corner in ([0.0, 10.0], [10.0, 20.0], [5.0, 15.0]):
        assert (found == torch.tensor(corner)).all(dim=1).any()


def test_every_piece_is_taken(asked: OneBox) -> None:
    found = load(NEEDLE)(drawn(asked, by_pieces=True)) > 0
    assert found.any(dim=0).all()
    assert (~found).any(dim=0).all()


def test_a_network_is_small_up_to_so_many_values_and_weights() -> None:
    assert is_small(capture(load(NEEDLE), (2,)))
    assert not is_small(capture(nn.Linear(8, MOST_CONSTANTS // 8), (8,)))
    assert not is_small(capture(nn.Sequential(*(nn.ReLU() for _ in range(9))), (2000,)))
