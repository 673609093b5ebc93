"""Defines the classifiers of pictures that the package torchvision has by name."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from service.jobs.spec.families.packaged import PRETRAINED, PictureConfig, check_keys

_REFUSED = {**PRETRAINED, "progress": "about downloads", "num_classes": "said by classes"}


class TorchvisionConfig(PictureConfig):
    """An architecture of torchvision, which reads three colours: ``{family: torchvision, name: resnet18, …}``."""

    family: Literal["torchvision"] = Field("torchvision", description="an architecture of the package torchvision")

    @property
    def package(self) -> str:
        return "torchvision"

    @property
    def in_shape(self) -> tuple[int, int, int]:
        return 3, self.height, self.width

    @model_validator(mode="after")
    def _options_are_no_code(self) -> TorchvisionConfig:
        check_keys(self.options, _REFUSED, "options")
        return self
