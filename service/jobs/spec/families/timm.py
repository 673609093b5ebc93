"""Defines the classifiers of pictures that the package timm has by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from service.jobs.spec.families.packaged import PRETRAINED, PictureConfig


class TimmConfig(PictureConfig):
    """An architecture of timm: ``{family: timm, name: resnet18, channels: 3, height: 32, width: 32, classes: 10}``."""

    refused_options: ClassVar[Mapping[str, str]] = {
        **PRETRAINED,
        "features_only": "a model without an output of classes",
        "cache_dir": "a folder of the worker's",
        "num_classes": "said by classes",
        "in_chans": "said by channels",
        "scriptable": "about TorchScript",
        "exportable": "about TorchScript",
        "no_jit": "about TorchScript",
    }
    family: Literal["timm"] = Field("timm", description="an architecture of the package timm")
    channels: int = Field(3, ge=1, le=2**16, description="channels of a picture: 1 for grey, 3 for colours")

    @property
    def package(self) -> str:
        return "timm"

    @property
    def in_shape(self) -> tuple[int, int, int]:
        return self.channels, self.height, self.width
