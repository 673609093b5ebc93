"""The family's module: a chain of blocks that a pipeline may cut, each a column/row pair."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn

from service.models.initialize import Distribution, Uniform
from service.parallel.collectives import copy_to_group
from service.parallel.mesh import SINGLE, Axis
from service.parallel.tensor import ColumnParallelLinear, OnEveryRank, RowParallelLinear
from trivet_example.declared import GatedConfig


class GatedBlock(nn.Module):
    def __init__(self, width: int, inner: int, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.gate = ColumnParallelLinear(width, inner, axis, copied_input=True)
        self.up = ColumnParallelLinear(width, inner, axis, copied_input=True)
        self.down = RowParallelLinear(inner, width, axis)

    def forward(self, x: Tensor) -> Tensor:
        entered = copy_to_group(x, self.axis.group)
        return x + self.down(torch.sigmoid(self.gate(entered)) * self.up(entered))


class GatedNetwork(nn.Module):
    before_blocks = ("enter",)
    after_blocks = ("leave",)
    output_axis = SINGLE
    is_static = True

    def __init__(self, config: GatedConfig, axis: Axis) -> None:
        super().__init__()
        self.config = config
        self.enter: nn.Module | None = OnEveryRank(nn.Linear(config.in_features, config.width))
        self.blocks = nn.ModuleDict(
            {str(index): GatedBlock(config.width, config.inner, axis) for index in range(config.blocks)}
        )
        self.leave: nn.Module | None = OnEveryRank(nn.Linear(config.width, config.out_features))

    def forward(self, x: Tensor) -> Tensor:
        if self.enter is not None:
            x = torch.tanh(self.enter(x))
        for block in self.blocks.values():
            x = block(x)
        return x if self.leave is None else self.leave(x)

    def distribution(self, name: str) -> Distribution:
        fan_in = {"enter": self.config.in_features, "down": self.config.inner}
        return Uniform(1 / sqrt(next((size for part, size in fan_in.items() if part in name), self.config.width)))


def build(config: GatedConfig, axis: Axis) -> nn.Module:
    return GatedNetwork(config, axis)
