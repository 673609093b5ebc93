"""Defines the fully connected classifier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from service.jobs.plugins import Features, ModelConfig


class MlpConfig(ModelConfig):
    """A fully connected classifier: ``in_features → hidden… → out_features``."""

    family: Literal["mlp"] = Field("mlp", description="fully connected layers")
    in_features: int = Field(ge=1, le=2**24, description="numbers in an input")
    hidden: tuple[Annotated[int, Field(ge=1, le=2**24)], ...] = Field(
        (64, 64), min_length=1, max_length=1024, fail_fast=True, description="widths of the layers before the last"
    )
    out_features: int = Field(ge=1, le=2**24, description="numbers in an output: classes")
    activation: Literal["relu", "gelu", "tanh"] = Field("relu", description="activation between the layers")

    @property
    def places(self) -> int:
        return len(self.hidden)

    @property
    def divided(self) -> Mapping[str, int]:
        return {f"hidden.{index}": width for index, width in enumerate(self.hidden)}

    @property
    def parameter_names(self) -> tuple[str, ...]:
        layers = (*(f"blocks.{index}.linear" for index in range(len(self.hidden))), "head")
        return tuple(f"{layer}.{part}" for layer in layers for part in ("weight", "bias"))

    @property
    def reads(self) -> Features:
        return Features(self.in_features, self.out_features, features_field="in_features", classes_field="out_features")
