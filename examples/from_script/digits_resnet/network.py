"""The network of the script: its classes as they are, and the function that Trivet calls."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from digits_resnet.declared import DigitsResnet


class Block(nn.Module):
    """Two convolutions around which the input passes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        return nn.functional.relu(pictures + self.inner(pictures))


def small_resnet(width: int = 16, blocks: int = 2, classes: int = 10) -> nn.Module:
    """Return the network."""
    head = [nn.Flatten(), nn.Linear(64 * width, classes)]
    return nn.Sequential(nn.Conv2d(1, width, 3, padding=1), *(Block(width) for _ in range(blocks)), *head)


def build(config: DigitsResnet, _axis: Any) -> nn.Module:
    """Return the network for samples of Trivet's ``digits``, which are rows of 64 numbers."""
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), small_resnet(config.width))
