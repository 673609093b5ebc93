"""A convolutional classifier, divided over tensor-parallel ranks in column/row pairs of channels."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

from service.jobs.spec.families import ConvnetConfig
from service.models.initialize import Distribution, Uniform
from service.models.mlp import ACTIVATIONS, HiddenLayer
from service.parallel.collectives import copy_to_group, reduce_from_group
from service.parallel.mesh import SINGLE, Axis
from service.parallel.tensor import RowParallelLinear, local
from service.parallel.tensor.placement import divided


class _ColumnParallelConvolution(nn.Module):
    """A convolution with its output channels divided over ``axis``; the kernel is odd, and zeros surround the image.

    Input ``(batch, in_channels, H, W)``, replicated. Output ``(batch, out_channels / tp, H / stride, W / stride)``,
    rounded up.
    """

    sharded = {"weight": 0, "bias": 0}  # noqa: RUF012 - a constant of the class

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int, axis: Axis = SINGLE) -> None:
        super().__init__()
        self.stride, self.padding, self.axis = stride, kernel // 2, axis
        own = divided(out_channels, axis, "out_channels")
        self.weight = nn.Parameter(torch.empty(own, in_channels, kernel, kernel))
        self.bias = nn.Parameter(torch.empty(own))

    def forward(self, x: Tensor) -> Tensor:
        x = copy_to_group(x, self.axis.group)
        return functional.conv2d(x, local(self.weight), local(self.bias), self.stride, self.padding)


class _RowParallelConvolution(nn.Module):
    """A convolution with its input channels divided over ``axis``; the bias is added once, after the sum.

    Input ``(batch, in_channels / tp, H, W)``, this rank's channels. Output whole and replicated.
    """

    sharded = {"weight": 1}  # noqa: RUF012 - a constant of the class

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int, axis: Axis = SINGLE) -> None:
        super().__init__()
        self.stride, self.padding, self.axis = stride, kernel // 2, axis
        self.weight = nn.Parameter(torch.empty(out_channels, divided(in_channels, axis, "in_channels"), kernel, kernel))
        self.bias = nn.Parameter(torch.empty(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.axis.size == 1:
            return functional.conv2d(x, local(self.weight), local(self.bias), self.stride, self.padding)
        x = reduce_from_group(
            functional.conv2d(x, local(self.weight), None, self.stride, self.padding), self.axis.group
        )
        return x + local(self.bias).view(-1, 1, 1)


class _ConvolutionLayer(nn.Module):
    """A convolution, its activation, an average over windows. Even layers are column-, odd ones row-parallel."""

    def __init__(self, config: ConvnetConfig, index: int, axis: Axis) -> None:
        super().__init__()
        channels = (config.in_channels, *config.channels)
        kind = _RowParallelConvolution if index % 2 else _ColumnParallelConvolution
        self.convolution = kind(channels[index], channels[index + 1], config.kernel, config.stride, axis)
        self.activation, self.pool = ACTIVATIONS[config.activation], config.pool

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.convolution(x))
        return functional.avg_pool2d(x, self.pool) if self.pool > 1 else x


class Image(nn.Module):
    """Turns flat samples, or samples in another shape, into images."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, *self.shape)


class Convnet(nn.Module):
    """``(batch, in_channels · height · width) → (batch, out_features)`` logits, replicated over ``tp``.

    Convolutions and fully connected layers are one chain of blocks, which alternates between column- and
    row-parallel. A rank's channels lie together in the flat features, so that the alternation goes on where
    the image ends. The head is row-parallel, as an mlp's.
    """

    before_blocks: tuple[str, ...] = ("image",)
    after_blocks: tuple[str, ...] = ("head",)
    output_axis = SINGLE
    is_static = True

    def __init__(self, config: ConvnetConfig, axis: Axis = SINGLE) -> None:
        super().__init__()
        self.config = config
        depth, widths = len(config.channels), (config.flat_features, *config.hidden)
        self.image: Image | None = Image(config.in_shape)
        self.blocks = nn.ModuleDict({str(index): _ConvolutionLayer(config, index, axis) for index in range(depth)})
        for index in range(len(config.hidden)):
            layer = HiddenLayer(depth + index, widths[index], widths[index + 1], config.activation, axis)
            self.blocks[str(depth + index)] = layer
        self.head: RowParallelLinear | None = RowParallelLinear(
            widths[-1], config.out_features, axis, scatter_input=len(self.blocks) % 2 == 0
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.image is not None:
            x = self.image(x)
        for block in self.blocks.values():
            x = block(x if isinstance(block, _ConvolutionLayer) else x.flatten(1))
        return x if self.head is None else self.head(x.flatten(1))

    def distribution(self, name: str) -> Distribution:
        """Draw weights and biases uniformly within ±1/√fan-in."""
        config, depth = self.config, len(self.config.channels)
        widths = (config.flat_features, *config.hidden)
        if name.startswith("head."):
            return Uniform(1 / sqrt(widths[-1]))
        index = int(name.split(".")[1])
        if index >= depth:
            return Uniform(1 / sqrt(widths[index - depth]))
        return Uniform(1 / sqrt((config.in_channels, *config.channels)[index] * config.kernel**2))
