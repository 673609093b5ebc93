"""Defines the classifiers of pictures that the package torchvision has by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from service.jobs.spec.families.packaged import PRETRAINED, PictureConfig


class TorchvisionConfig(PictureConfig):
    """An architecture of torchvision, which reads three colours: ``{family: torchvision, name: resnet18, …}``."""

    refused_options: ClassVar[Mapping[str, str]] = {
        **PRETRAINED,
        "progress": "about downloads",
        "num_classes": "said by classes",
    }
    family: Literal["torchvision"] = Field("torchvision", description="an architecture of the package torchvision")

    @property
    def package(self) -> str:
        return "torchvision"

    @property
    def in_shape(self) -> tuple[int, int, int]:
        return 3, self.height, self.width
