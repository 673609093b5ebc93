"""Makes a model of a module that was not written for it: one block, whole on each tensor-parallel rank."""

from __future__ import annotations

from math import prod
from typing import Protocol, cast

from torch import Tensor, nn

from service.jobs.plugins import ModelConfig
from service.models.initialize import Constant, Distribution, Normal, Uniform
from service.parallel.mesh import SINGLE
from service.torch_internals.table import internal

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class _Drawn(Protocol):
    def distribution(self, name: str) -> Distribution:
        """Return the distribution of the parameter of this name."""


class PlainModel(nn.Module):
    """The module as the only block of a chain. Its weights are drawn as torch draws those of its layers, or by its own
    ``distribution(name)``.
    """

    before_blocks: tuple[str, ...] = ()
    after_blocks: tuple[str, ...] = ()
    output_axis = SINGLE

    def __init__(self, config: ModelConfig, network: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleDict({"0": network})
        if (buffer := next((name for name, _ in network.named_buffers()), None)) is not None:
            raise ValueError(
                f"{type(network).__name__} has a buffer, {buffer!r}, and buffers are neither made on ranks nor kept in "
                "checkpoints; LayerNorm, GroupNorm and RMSNorm have none"
            )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.blocks["0"](x)
        return found

    def distribution(self, name: str) -> Distribution:
        inner = name.removeprefix("blocks.0.")
        network = self.blocks["0"]
        if hasattr(network, "distribution"):
            return cast(_Drawn, network).distribution(inner)
        owner, _, leaf = inner.rpartition(".")
        return _of_layer(network.get_submodule(owner), inner, leaf)


def _of_layer(layer: nn.Module, name: str, leaf: str) -> Distribution:
    if isinstance(layer, (nn.Linear, internal("torch.nn.modules.conv._ConvNd"))):
        return Uniform(prod(layer.weight.shape[1:]) ** -0.5)
    if isinstance(layer, _NORMS):
        return Constant(float(leaf == "weight"))
    if isinstance(layer, nn.Embedding):
        return Normal(1.0)
    raise ValueError(
        f"nothing says how {name!r} of a {type(layer).__name__} is drawn: give the network "
        f"`def distribution(self, name)`, which returns a Uniform, Normal or Constant of service.models.initialize"
    )
