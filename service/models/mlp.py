"""A fully connected classifier, divided over tensor-parallel ranks in column/row pairs."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

from torch import Tensor, nn
from torch.nn import functional

from service.jobs.spec.model import MlpConfig
from service.models.initialize import Distribution, Uniform
from service.parallel.mesh import SINGLE, Axis
from service.parallel.tensor import ColumnParallelLinear, RowParallelLinear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "tanh": functional.tanh,
}


class HiddenLayer(nn.Module):
    """A linear layer and its activation. Even layers are column-parallel, odd ones row-parallel."""

    def __init__(self, index: int, in_features: int, out_features: int, activation: str, axis: Axis) -> None:
        super().__init__()
        kind = RowParallelLinear if index % 2 else ColumnParallelLinear
        self.linear: nn.Module = kind(in_features, out_features, axis)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


class Mlp(nn.Module):
    """``(batch, in_features) → (batch, out_features)`` logits, replicated over ``tp``.

    The head is row-parallel, so that it leaves whole logits: it takes the shards that an odd number of hidden
    layers ends with, and slices the whole features that an even number ends with. Between pipeline stages
    a boundary inside a column/row pair carries each rank's own shard.
    """

    before_blocks: tuple[str, ...] = ()
    after_blocks: tuple[str, ...] = ("head",)
    output_axis = SINGLE
    is_static = True

    def __init__(self, config: MlpConfig, axis: Axis = SINGLE) -> None:
        super().__init__()
        self.config = config
        widths = (config.in_features, *config.hidden)
        self.blocks = nn.ModuleDict(
            {
                str(index): HiddenLayer(index, widths[index], widths[index + 1], config.activation, axis)
                for index in range(len(config.hidden))
            }
        )
        self.head: RowParallelLinear | None = RowParallelLinear(
            widths[-1], config.out_features, axis, scatter_input=len(config.hidden) % 2 == 0
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)

    def distribution(self, name: str) -> Distribution:
        """Draw weights and biases uniformly within ±1/√fan-in."""
        widths = (self.config.in_features, *self.config.hidden)
        fan_in = widths[-1] if name.startswith("head.") else widths[int(name.split(".")[1])]
        return Uniform(1 / sqrt(fan_in))
