"""Defines the convolutional classifier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Annotated, Literal

from pydantic import Field, model_validator

from service.jobs.plugins import Features, ModelConfig, disagreement

_Width = Annotated[int, Field(ge=1, le=2**24)]


class ConvnetConfig(ModelConfig):
    """Convolutions over an image, then fully connected layers: ``(C, H, W) → channels… → hidden… → out_features``.

    Every convolution keeps the image's size but for ``stride``; its activation is followed by a ``pool`` × ``pool``
    average.
    """

    family: Literal["convnet"] = Field("convnet", description="convolutions, then fully connected layers")
    in_channels: int = Field(1, ge=1, le=2**16, description="channels of an image: 1 for grey, 3 for colours")
    height: int = Field(ge=1, le=2**16, description="of an image, in pixels")
    width: int = Field(ge=1, le=2**16, description="of an image, in pixels")
    channels: tuple[_Width, ...] = Field(
        (16, 32),
        min_length=1,
        max_length=1024,
        fail_fast=True,
        description="output channels of each convolution in turn",
    )
    kernel: int = Field(3, ge=1, le=1023, description="odd")
    stride: int = Field(1, ge=1, le=64, description="of every convolution")
    pool: int = Field(
        1, ge=1, le=64, description="window and stride of an average pool after every activation; 1: none"
    )
    hidden: tuple[_Width, ...] = Field(
        (64,), max_length=1024, fail_fast=True, description="widths of the fully connected layers before the last"
    )
    out_features: int = Field(ge=1, le=2**24, description="numbers in an output: classes")
    activation: Literal["relu", "gelu", "tanh"] = Field("relu", description="activation after each layer but the last")

    @property
    def in_shape(self) -> tuple[int, int, int]:
        return self.in_channels, self.height, self.width

    @property
    def flat_features(self) -> int:
        """Return how many numbers are in the output of the last convolution."""
        *_, (height, width) = self._sizes()
        return self.channels[-1] * height * width

    @property
    def places(self) -> int:
        return len(self.channels) + len(self.hidden)

    @property
    def divided(self) -> Mapping[str, int]:
        named = {"channels": self.channels, "hidden": self.hidden}
        return {f"{field}.{index}": width for field, widths in named.items() for index, width in enumerate(widths)}

    @property
    def takes_float8(self) -> bool:
        return bool(self.hidden)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        kinds = (*("convolution" for _ in self.channels), *("linear" for _ in self.hidden))
        layers = (*(f"blocks.{index}.{kind}" for index, kind in enumerate(kinds)), "head")
        return tuple(f"{layer}.{part}" for layer in layers for part in ("weight", "bias"))

    @property
    def reads(self) -> Features:
        return Features(prod(self.in_shape), self.out_features, shape=self.in_shape, classes_field="out_features")

    def flop_per_sample(self, parameters: int, sequence: int) -> int:
        """Count ``6·N`` for the fully connected layers, and for each kernel as often as it is placed on the image."""
        total, inputs, kernels = 0, self.in_channels, 0
        for (height, width), outputs in zip(self._convolved(), self.channels, strict=True):
            weights = (inputs * self.kernel**2 + 1) * outputs
            total, inputs, kernels = total + 6 * weights * height * width, outputs, kernels + weights
        return total + 6 * (parameters - kernels)

    def _convolved(self) -> Iterator[tuple[int, int]]:
        """Return height and width after each convolution, before its pooling."""
        height, width = self.height, self.width
        for _ in self.channels:
            height, width = -(-height // self.stride), -(-width // self.stride)
            yield height, width
            height, width = height // self.pool, width // self.pool

    def _sizes(self) -> list[tuple[int, int]]:
        """Return height and width after each layer."""
        return [(height // self.pool, width // self.pool) for height, width in self._convolved()]

    @model_validator(mode="after")
    def _fits_the_image(self) -> ConvnetConfig:
        if self.kernel % 2 == 0:
            message = f"kernel={self.kernel} is even: only an odd one has a centre, which keeps the image's size"
            raise disagreement("kernel", message, self.kernel, "an odd number")
        for index, (height, width) in enumerate(self._sizes()):
            if height < 1 or width < 1:
                message = (
                    f"nothing is left of {self.height}×{self.width} after layer {index} with stride={self.stride} and "
                    f"pool={self.pool}"
                )
                expected = "fewer channels, or a smaller stride or pool"
                raise disagreement("channels", message, list(self.channels), expected)
        return self
