"""Defines what the families of models that a package has by name have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, model_validator

from service.jobs.plugins import Features, ModelConfig, disagreement

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")]
Option = bool | int | float | str | list[int] | list[float] | list[str] | None
_MOST = 64


PACKAGES = ("timm", "torchvision", "transformers")


def versions_here() -> dict[str, str]:
    """Return the versions of those of :data:`PACKAGES` that this host has, without importing any."""
    found = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


class PackagedConfig(ModelConfig):
    """Base of a model that a package on the worker hosts builds, with random weights.

    Its weights are the package's own, by the package's names, if a file of them is named beside it.
    """

    batch_norm: Literal["synchronised", "per-rank"] = Field(
        "synchronised",
        description="statistics of batch normalisation: over all data-parallel ranks, as one process has them, or over "
        "each rank's own samples; running statistics are then the ranks' mean",
    )
    frozen: tuple[Name, ...] = Field(
        (),
        max_length=1024,
        fail_fast=True,
        description="parts that do not learn, by the beginning of the package's names of parameters, such as layer1; "
        "they behave as in evaluation",
    )

    @property
    @abstractmethod
    def package(self) -> str:
        """Return the name of the package that ranks import."""

    @property
    def package_version(self) -> str:
        """Return the package's version on this host; ``absent`` if it is not there."""
        return versions_here().get(self.package, "absent")

    @property
    def synchronises(self) -> bool:
        return self.batch_norm == "synchronised"

    @property
    def takes_float8(self) -> bool:
        return False  # its layers are the package's, but for those that tensor-parallel ranks divide


class PictureConfig(PackagedConfig):
    """Base of a classifier of pictures that a package has by name: ``(channels, height, width) → classes``."""

    name: Name = Field(description="the package's name of the architecture")
    height: int = Field(ge=1, le=2**16, description="of a picture, in pixels")
    width: int = Field(ge=1, le=2**16, description="of a picture, in pixels")
    classes: int = Field(ge=1, le=2**24, description="numbers in an output")
    options: dict[Name, Option] = Field(
        {}, max_length=_MOST, description="arguments of the package's function that builds the architecture"
    )

    refused_options: ClassVar[Mapping[str, str]]
    """What such an option would do, by its name."""

    @property
    @abstractmethod
    def in_shape(self) -> tuple[int, int, int]:
        """Return channels, height and width of a picture."""

    @property
    def reads(self) -> Features:
        return Features(prod(self.in_shape), self.classes, shape=self.in_shape, classes_field="classes")

    @model_validator(mode="after")
    def _options_are_no_code(self) -> PictureConfig:
        check_keys(self.options, self.refused_options, "options")
        return self


def check_keys(value: object, refused: Mapping[str, str], field: str) -> None:
    """Raise the error about the first key, at any depth, that is ``refused``: it maps keys to what they would do."""
    for path, key in _keys(value, field):
        reason = refused.get(key)
        if reason is None and key.startswith("_"):
            reason = "a name of the package's own, not of a configuration"
        if reason is not None:
            raise disagreement(path, f"{key!r} is {reason}", key, "a configuration without it")


def _keys(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield path, str(key)
            yield from _keys(each, path)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from _keys(each, path)


PRETRAINED: Mapping[str, Any] = dict.fromkeys(
    ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "weights", "weights_backbone", "checkpoint_path"),
    "about weights from elsewhere; those of an upload are named by safetensors",
)
