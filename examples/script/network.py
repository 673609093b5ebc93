"""A residual network for grey pictures of 8 × 8."""

from __future__ import annotations

from torch import Tensor, nn


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
